"""The cache by itself, inside jit: reserve once a step, then write and attend in every layer."""

import functools

import jax
import jax.numpy as jnp

import jaxkv

config = jaxkv.CacheConfig(
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    num_blocks=64,
    max_sequences=3,
    max_blocks_per_sequence=16,
    format="fp8k_turbo4v",
)


@functools.partial(jax.jit, donate_argnames="cache")
def step(cache, q, k, v, new_tokens):
    """One step: q, k, v [layers, S, T, heads, head_dim]; new_tokens int32[S], at most T each."""
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=q.shape[2])
    outputs = []
    for layer in range(config.num_layers):
        cache = jaxkv.write(cache, layer, k[layer], v[layer], plan)
        outputs.append(jaxkv.attend(cache, layer, q[layer], plan))
    return cache, jnp.stack(outputs), plan.granted


def random_step(cache, key, new_tokens, width):
    shape = (config.num_layers, config.max_sequences, width)
    q_key, k_key, v_key = jax.random.split(key, 3)
    q = jax.random.normal(q_key, (*shape, 6, config.head_dim))
    k, v = (jax.random.normal(one, (*shape, 2, config.head_dim)) for one in (k_key, v_key))
    return step(cache, q, k, v, jnp.asarray(new_tokens, jnp.int32))


def main():
    cache = jaxkv.init(config)
    keys = jax.random.split(jax.random.key(0), 10)
    # Three prompts of different lengths, then one token at a time; slot 1 sits out.
    cache, _, granted = random_step(cache, keys[0], [24, 7, 16], width=24)
    for key in keys[1:]:
        cache, outputs, granted = random_step(cache, key, [1, 0, 1], width=1)
    print("lengths", cache.lengths, "granted", granted, "output", outputs.shape)
    cache = jaxkv.release(cache, jnp.asarray([True, False, False]))
    print("free blocks", cache.num_free_blocks, "of", config.num_blocks)
    print(f"{config.bits_per_element:.2f} bits per element, {cache.nbytes:,} bytes of pages")
    jaxkv.check(cache)


if __name__ == "__main__":
    main()
