"""Optimizers: pure pairs `(init, update)` in optax's form, correct under any layout. docs/optimizers.md shows them.

adamw, adam, sgd, lion, lamb, adafactor, muon; made of others: chain, by_path, masked, accumulate, skip_nonfinite,
stochastic_rounding, inject; in a chain: clip_by_global_norm, clip, scale, add_decayed_weights, weight_ema (`get` reads
the average); the mask matrices; for loops of one's own apply_updates. Schedules:
constant, polynomial, exponential, cosine, piecewise, join, warmup, warmup_decay, warmup_cosine, warmup_stable_decay,
one_cycle, lr_range_test; for momentum one_cycle_momentum. `float32`: parameters of 16 bits as their masters.
"""

from shardlib.optim.adafactor import adafactor as adafactor
from shardlib.optim.adam import adam as adam
from shardlib.optim.adamw import adamw as adamw
from shardlib.optim.average import float32 as float32
from shardlib.optim.average import get as get
from shardlib.optim.average import weight_ema as weight_ema
from shardlib.optim.base import Optimizer as Optimizer
from shardlib.optim.base import apply_updates as apply_updates
from shardlib.optim.base import learning_rate as learning_rate
from shardlib.optim.base import matrices as matrices
from shardlib.optim.combine import by_path as by_path
from shardlib.optim.combine import chain as chain
from shardlib.optim.combine import masked as masked
from shardlib.optim.lamb import lamb as lamb
from shardlib.optim.lion import lion as lion
from shardlib.optim.muon import muon as muon
from shardlib.optim.schedules import constant as constant
from shardlib.optim.schedules import cosine as cosine
from shardlib.optim.schedules import exponential as exponential
from shardlib.optim.schedules import join as join
from shardlib.optim.schedules import lr_range_test as lr_range_test
from shardlib.optim.schedules import one_cycle as one_cycle
from shardlib.optim.schedules import one_cycle_momentum as one_cycle_momentum
from shardlib.optim.schedules import piecewise as piecewise
from shardlib.optim.schedules import polynomial as polynomial
from shardlib.optim.schedules import warmup as warmup
from shardlib.optim.schedules import warmup_cosine as warmup_cosine
from shardlib.optim.schedules import warmup_decay as warmup_decay
from shardlib.optim.schedules import warmup_stable_decay as warmup_stable_decay
from shardlib.optim.sgd import sgd as sgd
from shardlib.optim.transforms import add_decayed_weights as add_decayed_weights
from shardlib.optim.transforms import clip as clip
from shardlib.optim.transforms import clip_by_global_norm as clip_by_global_norm
from shardlib.optim.transforms import scale as scale
from shardlib.optim.wrap import accumulate as accumulate
from shardlib.optim.wrap import inject as inject
from shardlib.optim.wrap import skip_nonfinite as skip_nonfinite
from shardlib.optim.wrap import stochastic_rounding as stochastic_rounding
