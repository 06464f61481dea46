"""What the tests of two processes and of resuming cover, for the test that leaves no loss out."""

from tests.distributed import sharding_cases, training_cases
from tests.losses.cases import CASES
from tests.training.runs import LOSS_FLAGS

# Names of tests/losses/cases.py: two processes against one, values, gradients and state (test_losses.py).
TWO_PROCESS_CASES = set(CASES)
# Losses that two processes train, with the model replicated (test_training.py) and sharded (test_sharding.py).
TWO_PROCESS_LOSSES = {case.loss for case in (training_cases.CASES | training_cases.BLOCK_CASES).values()}
SHARDED_LOSSES = {case.loss for case in sharding_cases.CASES.values()}
# Losses whose runs are resumed bit for bit (tests/training/test_resume.py).
RESUMED_LOSSES = set(LOSS_FLAGS)
