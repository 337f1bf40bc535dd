"""Optimizers: pure pairs `(init, update)` in optax's form, correct under any layout.

adamw, sgd; by_path, chain, weight_ema (`get` reads the average); schedules warmup_cosine, constant; the mask matrices.
"""

from shardlib.optim.adamw import adamw as adamw
from shardlib.optim.average import get as get
from shardlib.optim.average import weight_ema as weight_ema
from shardlib.optim.base import Optimizer as Optimizer
from shardlib.optim.base import learning_rate as learning_rate
from shardlib.optim.base import matrices as matrices
from shardlib.optim.combine import by_path as by_path
from shardlib.optim.combine import chain as chain
from shardlib.optim.schedules import constant as constant
from shardlib.optim.schedules import warmup_cosine as warmup_cosine
from shardlib.optim.sgd import sgd as sgd
