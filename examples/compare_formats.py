"""What formats cost in quality on SmolLM2: perplexity, KL, top-1 agreement against stored bits.

`jaxkv eval` does the same with a progress bar, tables and a plot; this is the library's side of it.
"""

import sys

import numpy as np

from jaxkv.evaluate import Evaluation, python_text
from jaxkv.models import load_gguf

CASES = ("bf16", "int8", "fp8k_turbo4v+centered", "turbo4", "turbo4+centered", "turbo3+centered")


def main(windows=2, window_tokens=1024, cases=CASES):
    model, tokenizer = load_gguf()
    tokens = np.array(tokenizer.encode(python_text()))
    calibration, text = tokens[:4096], tokens[4096 : 4096 + windows * window_tokens]
    evaluation = Evaluation(
        model, text.reshape(windows, window_tokens), calibration_tokens=calibration
    )
    print(f"{'case':24} {'bits':>6} {'perplexity':>10} {'change':>8} {'KL':>8} {'top-1':>6}")
    for case in cases:
        r = evaluation.measure(case)
        print(
            f"{case:24} {r.bits:6.2f} {r.perplexity:10.3f} {r.loss_of_perplexity:+8.2%} "
            f"{r.kl:8.5f} {r.agreement:6.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
