"""shardlib: explicit functional train steps on sharded trees. `docs/tour.md` shows it in one page.

mesh              make_mesh use_mesh current_mesh Mesh
annotations       pytree spec stack static specs
at rest           shard gather reshard from_local local to_dtensor pad_to init abstract show Array
per device        shard_map typeof assume
collectives       psum psum_scatter all_gather all_to_all pmean pmax ppermute pbroadcast
                  ragged_all_to_all pvary pending axis_size axis_index
local, by pattern einsum rearrange reduce embed token_loss dropout iota; attention
one kernel        rms_norm
transforms        grad value_and_grad remat save_name scan custom_vjp
train step        step evaluate State Mean Aux Layout zero split place global_norm global_sum optim
                  precision dynamic_scale
pipelines         pipeline Schedule; schedules.one_f_one_b gpipe interleaved zero_bubble zbv dualpipe_v
compiled          jit: .lower(*args).collectives(), .memory(), .timeline(), .as_text(), .traces; passes profile Hardware
debugging         debug.print passes.check_finite
files             save latest restore compare
runs              preempted monitor
testing           testing.check check_loss check_optimizer meshes ranks collectives
random numbers    random.key split fold_in normal uniform bernoulli ...
"""

from shardlib import debug as debug
from shardlib import optim as optim
from shardlib import passes as passes
from shardlib import random as random
from shardlib import testing as testing
from shardlib.array import Array as Array
from shardlib.attention import attention as attention
from shardlib.autodiff import Aux as Aux
from shardlib.autodiff import grad as grad
from shardlib.autodiff import value_and_grad as value_and_grad
from shardlib.broadcast import pbroadcast as pbroadcast
from shardlib.checkpoint import compare as compare
from shardlib.checkpoint import latest as latest
from shardlib.checkpoint import restore as restore
from shardlib.checkpoint import save as save
from shardlib.collectives import axis_index as axis_index
from shardlib.collectives import axis_size as axis_size
from shardlib.collectives import pending as pending
from shardlib.collectives import pmax as pmax
from shardlib.collectives import pmean as pmean
from shardlib.collectives import ppermute as ppermute
from shardlib.collectives import pvary as pvary
from shardlib.custom import custom_vjp as custom_vjp
from shardlib.dropout import dropout as dropout
from shardlib.dtensor import to_dtensor as to_dtensor
from shardlib.errors import DonatedError as DonatedError
from shardlib.errors import MeshError as MeshError
from shardlib.errors import RankError as RankError
from shardlib.errors import ScheduleError as ScheduleError
from shardlib.errors import ShardError as ShardError
from shardlib.errors import SpecError as SpecError
from shardlib.errors import TreeError as TreeError
from shardlib.fused import rms_norm as rms_norm
from shardlib.graph.timeline import Hardware as Hardware
from shardlib.jit import jit as jit
from shardlib.loss_scale import dynamic_scale as dynamic_scale
from shardlib.mean import Mean as Mean
from shardlib.mesh import Mesh as Mesh
from shardlib.mesh import current_mesh as current_mesh
from shardlib.mesh import make_mesh as make_mesh
from shardlib.mesh import use_mesh as use_mesh
from shardlib.monitor import monitor as monitor
from shardlib.norms import global_norm as global_norm
from shardlib.norms import global_sum as global_sum
from shardlib.ops import all_gather as all_gather
from shardlib.ops import all_to_all as all_to_all
from shardlib.ops import einsum as einsum
from shardlib.ops import psum as psum
from shardlib.ops import psum_scatter as psum_scatter
from shardlib.ops import rearrange as rearrange
from shardlib.ops import reduce as reduce
from shardlib.padding import pad_to as pad_to
from shardlib.patterns import assume as assume
from shardlib.pipeline import schedules as schedules
from shardlib.pipeline.run import pipeline as pipeline
from shardlib.pipeline.schedule import Schedule as Schedule
from shardlib.policy import save_name as save_name
from shardlib.precision import precision as precision
from shardlib.profile import profile as profile
from shardlib.ragged import ragged_all_to_all as ragged_all_to_all
from shardlib.remat import remat as remat
from shardlib.scan import scan as scan
from shardlib.shard_map import shard_map as shard_map
from shardlib.show import show as show
from shardlib.state import abstract as abstract
from shardlib.state import from_local as from_local
from shardlib.state import gather as gather
from shardlib.state import init as init
from shardlib.state import local as local
from shardlib.state import reshard as reshard
from shardlib.state import shard as shard
from shardlib.step import State as State
from shardlib.step import evaluate as evaluate
from shardlib.step import step as step
from shardlib.tree import pytree as pytree
from shardlib.tree import spec as spec
from shardlib.tree import specs as specs
from shardlib.tree import stack as stack
from shardlib.tree import static as static
from shardlib.types import typeof as typeof
from shardlib.vocab import embed as embed
from shardlib.vocab import iota as iota
from shardlib.vocab import token_loss as token_loss
from shardlib.watch import preempted as preempted
from shardlib.zero import Layout as Layout
from shardlib.zero import place as place
from shardlib.zero import split as split
from shardlib.zero import zero as zero
