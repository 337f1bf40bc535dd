"""Contractions of plain tensors: einsum, as one matrix product wherever it is one."""

import math

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """`torch.einsum`, by one `mm` or `bmm` where there are two operands and every letter stands once in each that has
    it and on the right or in both.

    torch makes a batched product of everything, of permuted operands; gradients come out permuted too, and whoever
    reads them in memory order copies them.
    """
    if has_torch_function(operands):  # function modes, so that `Insert` sees it as one function
        return handle_torch_function(einsum, operands, equation, *operands)
    left, out = equation.split("->")
    terms = left.split(",")
    if len(operands) != 2 or not _product(terms[0], terms[1], out):
        return torch.einsum(equation, *operands)
    (a, b), (x, y) = terms, operands
    if out and next((n for n in out if n not in a or n not in b), out[0]) not in a:  # the left one leads in the result
        a, b, x, y = b, a, y, x
    sizes = dict(zip(a + b, (*x.shape, *y.shape), strict=True))
    batch = "".join(n for n in out if n in a and n in b)
    summed = "".join(n for n in (b if _flat(b, batch, y) else a) if n in a and n in b and n not in out)
    rows, columns = ("".join(n for n in one if n not in batch + summed) for one in (a, b))
    left = _matrix(x, a, (batch, rows, summed), sizes)
    right = _matrix(y, b, (batch, summed, columns), sizes)
    made = (torch.bmm if batch else torch.mm)(left, right)
    natural = batch + rows + columns
    made = made.reshape([sizes[n] for n in natural])
    return made if natural == out else made.permute([natural.index(n) for n in out])


def _product(a: str, b: str, out: str) -> bool:
    """Whether the letters make a product of matrices."""
    return "." not in a + b and all(len(set(t)) == len(t) for t in (a, b, out)) and set(a) ^ set(b) <= set(out)


def _flat(letters: str, batch: str, x: Tensor) -> bool:
    return letters[: len(batch)] == batch and x.is_contiguous()


def _matrix(x: Tensor, letters: str, groups: tuple[str, str, str], sizes: dict[str, int]) -> Tensor:
    """`x` with its dims in the order of the groups, each group (but an empty batch) one dim."""
    order = "".join(groups)
    if order != letters:
        x = x.permute([letters.index(n) for n in order])
    shape = [math.prod(sizes[n] for n in g) for g in groups]
    return x.reshape(shape if groups[0] else shape[1:])
