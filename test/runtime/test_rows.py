"""RowSdpaNode, RowUpdateNode and MaskLogitsNode compute what the instructions compute that they replace."""

import pytest
import torch
from executorch_mlx import reset
from irprograms import Graph, ir, lit, lits

STARTS, STOPS = (0, 20, 7), (5, 32, 8)
LENGTH = 32


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def masks_of(kind):
    if kind == "bool":
        return [torch.arange(stop - start) % 3 < 2 for start, stop in zip(STARTS, STOPS)]
    if kind == "float":
        return [tensor(4, 1, stop - start) for start, stop in zip(STARTS, STOPS)]
    return []


@pytest.mark.parametrize("masks", ["none", "bool", "float"])
@pytest.mark.parametrize(
    "query_dtype, cache_dtype",
    [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_attention_of_rows_has_the_bits_of_one_row(query_dtype, cache_dtype, masks):
    masks = masks_of(masks)
    g = Graph()
    q, k, v = tensor(1, 4, 3, 8, dtype=query_dtype), tensor(1, 2, LENGTH, 8), tensor(1, 2, LENGTH, 6)
    k, v = k.to(cache_dtype), v.to(cache_dtype)
    query, keys, values = g.input(q.shape, query_dtype), g.input(k.shape, cache_dtype), g.input(v.shape, cache_dtype)
    slots = [g.input(mask.shape, mask.dtype) for mask in masks]
    g.emit(
        ir.RowSdpaNode(
            q=query,
            k=keys,
            v=values,
            out=g.output((1, 4, 3, 6), query_dtype),
            starts=lits(*STARTS),
            stops=lits(*STOPS),
            masks=slots,
            scale=0.3,
        )
    )
    for row, (start, stop) in enumerate(zip(STARTS, STOPS)):
        parts = {}
        for name, x, first, last in (("q", query, row, row + 1), ("k", keys, start, stop), ("v", values, start, stop)):
            parts[name] = g.new_temp()
            g.emit(ir.SliceNode(x=x, out=parts[name], axis=lit(2), start=lit(first), stop=lit(last)))
        mask = {"mask": slots[row]} if slots else {}
        g.emit(ir.SdpaNode(**parts, out=g.output((1, 4, 1, 6), query_dtype), scale=0.3, **mask))
    together, *alone = g.run(q, k, v, *masks)
    assert together.equal(torch.cat(alone, 2)) and together.isfinite().all()


def update_program(dtype=torch.float32, starts=(9, 0, 30)):
    """A program that writes an input to the positions `starts` of a buffer, and returns the buffer."""
    g = Graph()
    update, buffer = g.input((1, 2, len(starts), 5), dtype), g.buffer((1, 2, LENGTH, 5), dtype)
    places = [ir.IntOrVid(vid=g.item(g.input((), torch.int64)), is_vid=True) for _ in starts]
    g.emit(ir.RowUpdateNode(dst=buffer, update=update, out=buffer, starts=places))
    g.emit(ir.IdCopyNode(x=buffer, out=g.output((1, 2, LENGTH, 5), dtype)))
    return g.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8], ids=str)
def test_update_of_rows(dtype):
    run = update_program(dtype)
    expected = torch.zeros(1, 2, LENGTH, 5, dtype=dtype)
    for call, starts in enumerate([(9, 0, 30), (10, 1, 31), (3, 3, 3)]):  # of equal positions, the last one counts
        update = (tensor(1, 2, 3, 5) * 50 + call).abs().to(dtype)
        for row, start in enumerate(starts):
            expected[:, :, start] = update[:, :, row]
        assert run(update, *map(torch.tensor, starts))[0].equal(expected)


def test_failed_update_of_rows_changes_nothing(capfd):
    run = update_program()
    update = tensor(1, 2, 3, 5)
    before = run(update, *map(torch.tensor, (1, 2, 3)))[0].clone()
    with pytest.raises(RuntimeError):
        run(update + 1, *map(torch.tensor, (4, 5, LENGTH)))
    assert "(RowUpdateNode): starts: got 32, expected less than 32" in capfd.readouterr().err
    again = run(update, *map(torch.tensor, (1, 2, 3)))[0]
    assert again.equal(before)


def test_rows_written_before_a_failure_are_undefined_until_a_reset(capfd):
    g = Graph()
    update, buffer = g.input((1, 2, 3, 5)), g.buffer((1, 2, LENGTH, 5))
    *places, stop = [ir.IntOrVid(vid=g.item(g.input((), torch.int64)), is_vid=True) for _ in range(4)]
    g.emit(ir.RowUpdateNode(dst=buffer, update=update, out=buffer, starts=places))
    g.emit(ir.IdCopyNode(x=buffer, out=g.output((1, 2, LENGTH, 5))))
    g.emit(ir.SliceNode(x=update, out=g.output((1, 2, 3, 5)), axis=lit(2), start=lit(0), stop=stop))
    run = g.load()
    update, elsewhere = tensor(1, 2, 3, 5), [torch.tensor(place) for place in (20, 21, 22)]
    run(update, *elsewhere, torch.tensor(3))
    with pytest.raises(RuntimeError):  # two rows where the program declares three; position 20 is written twice
        run(update + 1, *[torch.tensor(place) for place in (20, 9, 20)], torch.tensor(2))
    assert "expected" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="the mutable buffers are undefined"):
        run(update, *elsewhere, torch.tensor(3))
    reset()
    assert run(update, *elsewhere, torch.tensor(3))[0][:, :, :20].count_nonzero() == 0


@pytest.mark.parametrize("vocabulary", [64, 70, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mask_of_logits(vocabulary, dtype):
    logits = tensor(2, vocabulary, dtype=dtype)
    words = -(-vocabulary // 32)
    allowed = torch.randint(2, (2, words * 32), generator=torch.Generator().manual_seed(1))
    for bits in (allowed, torch.ones_like(allowed), torch.zeros_like(allowed), allowed | (torch.tensor([[0], [1]]))):
        packed = (bits.reshape(2, words, 32) << torch.arange(32)).sum(-1)
        mask = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        mask[:, -1] &= (
            (1 << vocabulary - 32 * (words - 1)) - 1 if vocabulary % 32 else -1
        )  # bits beyond it do not count
        g = Graph()
        x, m = g.input(logits.shape, dtype), g.input(mask.shape, torch.int32)
        g.emit(ir.MaskLogitsNode(logits=x, allowed=m, out=g.output(logits.shape)))
        expected = torch.where(bits[:, :vocabulary] > 0, logits.float(), -torch.inf)
        assert g.run(logits, mask)[0].equal(expected)


def refused(node, inputs, output, arguments, capfd):
    g = Graph()
    slots = [g.input(x.shape, x.dtype) for x in arguments]
    g.emit(node(**dict(zip(inputs, slots)), out=g.output(output)))
    with pytest.raises(RuntimeError):
        g.run(*arguments)
    return capfd.readouterr().err


@pytest.mark.parametrize(
    "q, starts, stops, message",
    [
        ((1, 4, 2, 8), (0,), (1,), "q: got float32[1,4,2,8], expected a query for each of 1 rows"),
        ((2, 4, 1, 8), (0,), (1,), "q: got float32[2,4,1,8]"),
        ((1, 4, 1, 8), (0,), (1, 2), "stops: got 2 numbers, expected 1"),
        ((1, 4, 1, 8), (3,), (3,), "got start 3 and stop 3, expected keys in [0, 32)"),
        ((1, 4, 1, 8), (3,), (33,), "got start 3 and stop 33"),
        ((1, 4, 1, 8), (-1,), (3,), "starts: got -1, expected at least 0"),
        ((4, 1, 8), (0,), (3,), "expected 4 axes each"),
    ],
)
def test_rows_of_attention_are_checked(q, starts, stops, message, capfd):
    node = lambda **slots: ir.RowSdpaNode(starts=lits(*starts), stops=lits(*stops), scale=1.0, **slots)  # noqa: E731
    arguments = (tensor(*q), tensor(1, 2, LENGTH, 8), tensor(1, 2, LENGTH, 8))
    assert message in refused(node, "qkv", (1, 4, 1, 8), arguments, capfd)


@pytest.mark.parametrize(
    "shape, dtype", [((1, 2, 2, 5), torch.float32), ((1, 2, 3, 5), torch.float16), ((2, 3, 5), torch.float32)]
)
def test_updates_of_rows_are_checked(shape, dtype, capfd):
    node = lambda **slots: ir.RowUpdateNode(starts=lits(0, 1, 2), **slots)  # noqa: E731
    arguments = (tensor(1, 2, LENGTH, 5), tensor(*shape, dtype=dtype))
    error = refused(node, ("dst", "update"), (1, 2, LENGTH, 5), arguments, capfd)
    assert "expected 3 positions for float32[1,2,32,5]" in error


@pytest.mark.parametrize("mask", [torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)])
def test_masks_of_logits_are_checked(mask, capfd):
    error = refused(ir.MaskLogitsNode, ("logits", "allowed"), (2, 40), (tensor(2, 40), mask), capfd)
    assert "expected int32[2,2]" in error


def test_masks_of_rows_are_for_one_query(capfd):
    node = lambda q, k, v, mask, out: ir.RowSdpaNode(  # noqa: E731
        q=q, k=k, v=v, masks=[mask, mask], out=out, starts=lits(0, 0), stops=lits(3, 3), scale=1.0
    )
    arguments = (tensor(1, 4, 2, 8), tensor(1, 2, LENGTH, 8), tensor(1, 2, LENGTH, 8), tensor(1, 1, 2, 3))
    error = refused(node, ("q", "k", "v", "mask"), (1, 4, 2, 8), arguments, capfd)
    assert "masks: got float32[1,1,2,3], expected an array that broadcasts to [1,4,1,3]" in error
