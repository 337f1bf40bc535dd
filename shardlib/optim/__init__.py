"""Optimizers: pure pairs `(init, update)` in optax's form, correct under any layout."""

from shardlib.optim.adamw import adamw as adamw
from shardlib.optim.base import Optimizer as Optimizer
from shardlib.optim.base import learning_rate as learning_rate
from shardlib.optim.base import matrices as matrices
from shardlib.optim.schedules import constant as constant
from shardlib.optim.schedules import warmup_cosine as warmup_cosine
from shardlib.optim.sgd import sgd as sgd
