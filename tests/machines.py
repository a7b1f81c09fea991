"""Running a hypothesis state machine the same way every time."""

import hypothesis
import hypothesis.stateful


def run_machine(machine, examples, steps, **fields):
    """Runs `examples` random sequences of at most `steps` rules; `fields` are class attributes."""
    hypothesis.stateful.run_state_machine_as_test(
        type("Machine", (machine,), fields),
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
