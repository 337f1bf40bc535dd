"""`DTensor`s there and back on real ranks: equal wholes, equal pieces, nothing sent; and what it cannot hold."""

import pytest
import torch

import shardlib as sl

# by spec, the placements over (dp=2, tp=2), and shapes that need not divide
KINDS = {
    "m n": ("(Replicate(), Replicate())", (3, 5)),
    "m/dp n/tp": ("(Shard(dim=0), Shard(dim=1))", (5, 3)),
    "m/tp n": ("(Replicate(), Shard(dim=0))", (1, 2)),
    "m/dp/tp n": ("(Shard(dim=0), Shard(dim=0))", (7, 2)),
    "m/tp/dp n": ("(_StridedShard(dim=0, sf=2), Shard(dim=0))", (8, 2)),
    "m n/tp/dp": ("(_StridedShard(dim=1, sf=2), Shard(dim=1))", (3, 4)),
}


def there_and_back() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = sl.use_mesh(sl.make_mesh(dp=2, tp=2))
    for spec, (places, shape) in KINDS.items():
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        x = sl.shard(whole, spec)
        d = sl.to_dtensor({"x": x})["x"]
        assert isinstance(d, DTensor) and torch.equal(d.full_tensor(), whole), spec
        assert str(d.placements) == places and torch.equal(d.to_local(), x.local()), spec
        back = sl.shard({"x": d}, spec)["x"]
        assert str(back.spec) == spec and torch.equal(back.local(), x.local()), spec
        other = sl.shard(d, "rows/tp columns/dp")  # moved to another cut, as reshard would
        assert str(other.spec) == "rows/tp columns/dp" and torch.equal(sl.gather(other), whole), spec
    theirs = distribute_tensor(torch.arange(21.0).view(7, 3), mesh.device_mesh, [Shard(0), Replicate()])
    assert torch.equal(sl.gather(sl.shard(theirs.requires_grad_(), "m/dp n")), torch.arange(21.0).view(7, 3))
    partial = DTensor.from_local(torch.full((4,), float(mesh.rank)), mesh.device_mesh, [Partial(), Shard(0)])
    assert sl.gather(sl.shard(partial, "m/tp")).tolist() == [2.0] * 4 + [4.0] * 4


def errors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = sl.use_mesh(sl.make_mesh(dp=2, tp=2))
    with pytest.raises(sl.SpecError, match=r"`a`: `m/tp/dp`, \(7,\): DTensor cuts .* sl.reshard `m` to `m/dp/tp`"):
        sl.to_dtensor({"a": sl.shard(torch.ones(7), "m/tp/dp")})
    flat = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (4,)), [Replicate()])
    with pytest.raises(sl.MeshError, match="need the same ranks in the same places"):
        sl.shard(flat, "m")
    most = DTensor.from_local(torch.ones(3), mesh.device_mesh, [Partial("max"), Replicate()])
    with pytest.raises(sl.SpecError, match="only sums can wait in a spec"):
        sl.shard(most, "m")


def test_there_and_back():
    sl.testing.ranks(4)(there_and_back)()


def test_errors_on_ranks():
    sl.testing.ranks(4)(errors)()


def test_errors_here():
    with sl.make_mesh(dp=2, simulate=True):
        with pytest.raises(sl.MeshError, match="to_dtensor: `a`: a simulated mesh has no DeviceMesh"):
            sl.to_dtensor({"a": sl.shard(torch.ones(4), "m/dp")})
        with pytest.raises(sl.SpecError, match="to_dtensor: a Tensor, not an array at rest"):
            sl.to_dtensor(torch.ones(4))
    with sl.make_mesh(dp=1) as mesh, pytest.raises(sl.MeshError, match="a DeviceMesh needs a process group: start it"):
        _ = mesh.device_mesh
