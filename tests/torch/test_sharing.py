"""Tensors that share memory share it again, and cost their bytes once."""

import pytest
import torch
from torch_states import differences, shared

from fpformat.names import HIDDEN_PREFIX
from fpformat.read.reader import open_checkpoint
from fpformat.read.verify import verify_checkpoint
from fpformat_io.torch import load, save


def stored(state, path):
    report = save(state, path)
    assert not verify_checkpoint(path).problems
    again = load(path)
    assert not differences(state, again)
    return report, again


def hidden(path):
    with open_checkpoint(path) as checkpoint:
        return [key[0] for key in checkpoint.keys() if checkpoint.entry(key).hidden]  # noqa: SIM118


def test_two_names_of_one_tensor(tmp_path):
    weight = torch.arange(2048.0).reshape(64, 32)
    state = {"embed": weight, "head": weight, "norm": torch.ones(32), "deep": [{"x": weight}]}
    report, again = stored(state, tmp_path / "c")
    assert report.data_nbytes < weight.nbytes + 512
    assert report.tensor_count == 4
    assert shared(again) == [["deep/0/x", "embed", "head"]]
    again["embed"][0, 0] = -1
    assert again["head"][0, 0] == again["deep"][0]["x"][0, 0] == -1


def test_one_parameter_under_two_names_is_one_object(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    state = {"a": weight, "b": weight, "data": weight.data, "other": torch.nn.Parameter(weight[:2])}
    _, again = stored(state, tmp_path / "c")
    assert again["a"] is again["b"]
    assert again["a"].data_ptr() == again["data"].data_ptr() == again["other"].data_ptr()


def test_a_tied_model_stays_tied(tmp_path):
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5)})
    net["head"].weight = net["embed"].weight
    state = net.state_dict()
    _, again = stored(state, tmp_path / "c")
    assert shared(again) == [["embed.weight", "head.weight"]]


def test_views_of_a_member_that_covers_them(tmp_path):
    flat = torch.arange(24.0)
    state = {
        "z_flat": flat,
        "row": flat.view(4, 6)[1],
        "column": flat.view(4, 6)[:, 2],
        "transposed": flat.view(4, 6).t(),
        "bits": flat.view(torch.int32)[3:9],
        "expanded": flat[:1].expand(5),
    }
    report, again = stored(state, tmp_path / "c")
    assert report.untied == ()
    assert hidden(tmp_path / "c") == []
    assert len(shared(again)[0]) == 6
    assert [value.stride() for value in again.values()] == [v.stride() for v in state.values()]
    again["z_flat"].zero_()
    assert not any(value.any() for value in again.values())


@pytest.mark.parametrize("other", [torch.float32, torch.int16])
def test_views_without_a_common_member_get_a_hidden_base(other, tmp_path):
    base = torch.arange(100, dtype=torch.float32)
    state = {"b": base[10:40], "a": base.view(other)[30 * 4 // other.itemsize :][:200]}
    report, again = stored(state, tmp_path / "c")
    assert hidden(tmp_path / "c") == [f"{HIDDEN_PREFIX}a"]
    assert shared(again) == [["a", "b"]]
    assert report.untied == ()
    with open_checkpoint(tmp_path / "c") as checkpoint:
        entry = checkpoint.entry(f"{HIDDEN_PREFIX}a")
        assert entry.dtype.name == ("F32" if other is torch.float32 else "U8")
        assert len(entry.shape) == 1


def test_a_base_that_would_be_too_large_is_not_stored(tmp_path):
    base = torch.arange(100_000, dtype=torch.int64)
    state = {"a": base[::50_000], "b": base[50_000::10_000], "alone": base[7:9]}
    report, again = stored(state, tmp_path / "c")
    assert report.untied == ("a", "b")
    assert shared(again) == []
    assert report.data_nbytes < 1000


def test_names_that_lose_one_tie_keep_the_other(tmp_path):
    base = torch.arange(100_000, dtype=torch.int64)
    wide = base[::50_000]
    report, again = stored({"a": wide, "a2": wide, "b": base[50_000::10_000]}, tmp_path / "c")
    assert shared(again) == [["a", "a2"]]
    assert report.untied == ("a", "a2", "b")


def test_slices_that_only_interlace_are_no_ties(tmp_path):
    base = torch.arange(64 * 1024.0).view(64, 1024)
    state = {"even": base[:, 0], "odd": base[:, 1], "left": base[:, 8:16], "right": base[:, 16:24]}
    report, again = stored(state, tmp_path / "c")
    assert (report.untied, shared(again)) == ((), [])
    assert report.data_nbytes < 10_000


def test_a_conjugate_view_is_stored_apart(tmp_path):
    base = torch.tensor([1 + 2j, 3 - 4j])
    report, again = stored({"a": base, "b": base.conj(), "c": base.conj()}, tmp_path / "c")
    assert report.untied == ("b", "c")
    assert shared(again) == [["b", "c"]]


def test_bytes_at_an_odd_offset(tmp_path):
    raw = torch.arange(64, dtype=torch.uint8)
    state = {
        "odd": raw[1:50],
        "words": raw[4:60].view(torch.int32),
        "doubles": raw[8:].view(torch.int64),
    }
    _, again = stored(state, tmp_path / "c")
    assert shared(again) == [["doubles", "odd", "words"]]


def test_a_view_chosen_alone_does_not_bring_its_base(tmp_path):
    flat = torch.arange(10_000.0)
    save({"flat": flat, "part": flat[10:20], "once": flat[:1].expand(10**6)}, tmp_path / "c")
    part = load(tmp_path / "c", keys=["part"])["part"]
    assert torch.equal(part, flat[10:20])
    assert part.untyped_storage().nbytes() == 40
    once = load(tmp_path / "c", keys=["once"])["once"]
    assert once.untyped_storage().nbytes() <= flat.nbytes
    assert once.shape == (10**6,)


def test_many_views_of_one_buffer(tmp_path):
    flat = torch.arange(30_000.0)
    state = {"flat": flat}
    state |= {f"p{place}": flat[place * 10 : place * 10 + 10].view(2, 5) for place in range(3000)}
    state |= {
        f"t{place}": flat[place * 10 : place * 10 + 10].view(2, 5).t() for place in range(300)
    }
    report, again = stored(state, tmp_path / "c")
    assert report.untied == ()
    assert len(shared(again)[0]) == len(state)
