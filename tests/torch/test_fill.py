"""Loading into a state that exists: what fits, what does not, and nothing half done."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch_states import differences

from fpformat.errors import FormatError, PlanError
from fpformat_io.torch import load_into, save

MEMORY = torch.ones(1)


def state():
    return {
        "w": torch.arange(6.0).view(2, 3),
        "p": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(3),
        "groups": [{"betas": (0.9, 0.95), "lr": torch.tensor(1e-3), "pair": (1, torch.ones(2))}],
        "step": 7,
    }


def template():
    return {
        "w": torch.zeros(3, 2).t(),
        "p": torch.nn.Parameter(torch.zeros(2)),
        "array": np.zeros(3, dtype=np.int64),
        "groups": [{"betas": (0.0, 0.0), "lr": torch.tensor(0.0), "pair": (0, torch.zeros(2))}],
        "step": None,
    }


@pytest.fixture
def path(tmp_path):
    save(state(), tmp_path / "c")
    return tmp_path / "c"


def test_tensors_are_filled_in_place_and_values_replaced(path):
    target = template()
    group = target["groups"][0]
    held = [target["w"], target["p"], target["array"], target["groups"], group, group["lr"]]
    inner = group["pair"][1]
    report = load_into(path, target)
    assert not differences(state(), target)
    now = [target["w"], target["p"], target["array"], target["groups"], group, group["lr"]]
    assert all(old is new for old, new in zip(held, now, strict=True))
    assert target["groups"][0] is group
    assert group["pair"][1] is inner
    assert target["w"].stride() == (1, 2)
    assert target["p"].requires_grad
    assert len(report.loaded) == 9
    assert report.missing == report.unexpected == report.mismatched == ()


def test_a_model_and_its_optimizer(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        return net, optimizer

    net, optimizer = build(1)
    save({"n": net.state_dict(), "o": optimizer.state_dict()}, tmp_path / "c")
    other, resumed = build(2)
    target = {"n": other.state_dict(), "o": resumed.state_dict()}
    load_into(tmp_path / "c", target)
    assert not differences(net.state_dict(), other.state_dict())
    assert not differences(optimizer.state_dict(), target["o"])


def change(name, value):
    def apply(target):
        if value is ...:
            del target[name]
        else:
            target[name] = value

    return apply


DIFFERENCES = {
    "missing": (change("extra", torch.ones(1)), "missing in the checkpoint: 'extra'"),
    "missing_value": (change("extra", 1), "missing in the checkpoint: 'extra'"),
    "unexpected": (change("step", ...), "unexpected in the checkpoint: 'step'"),
    "shape": (change("w", torch.zeros(3, 2)), "w: shape (2, 3) in the checkpoint, (3, 2)"),
    "dtype": (change("w", torch.zeros(2, 3).double()), "w: dtype F32 in the checkpoint, F64"),
    "tensor_for_value": (change("step", torch.zeros(1)), "step: is a Tensor in the template"),
    "value_for_tensor": (change("w", 0), "w: is a tensor in the checkpoint, but a int"),
    "array_for_tensor": (change("w", np.zeros((2, 3))), "but a ndarray"),
    "tensor_for_array": (change("array", torch.zeros(3)), "is a numpy array in the checkpoint"),
    "array_shape": (change("array", np.zeros(4, dtype=np.int64)), "array: shape (3,)"),
    "meta": (change("w", torch.zeros(2, 3, device="meta")), "meta device"),
    "repeats": (change("w", MEMORY.expand(2, 3)), "repeats its own memory"),
    "frozen": (change("array", np.frombuffer(bytes(24), dtype=np.int64)), "read-only"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_an_error_and_nothing_changes(path, name):
    apply, reason = DIFFERENCES[name]
    target = template()
    apply(target)
    with pytest.raises(PlanError) as caught:
        load_into(path, target)
    assert len(caught.value.problems) == 1
    assert reason in caught.value.problems[0]
    expected = template()
    apply(expected)
    if name == "meta":
        del target["w"], expected["w"]
    assert not differences(target, expected)


def test_all_differences_stand_in_one_error(path):
    target = template()
    target["w"], target["new"] = torch.zeros(1), 1
    del target["step"]
    with pytest.raises(PlanError) as caught:
        load_into(path, target)
    assert len(caught.value.problems) == 3


def test_not_strict_loads_what_fits_and_reports_the_rest(path):
    target = template()
    target["w"], target["new"] = torch.zeros(1), 1
    del target["step"]
    report = load_into(path, target, strict=False)
    assert report.missing == ("new",)
    assert report.unexpected == ("step",)
    assert [line.split(":")[0] for line in report.mismatched] == ["w"]
    assert target["w"] == 0
    assert target["new"] == 1
    assert target["p"].tolist() == [1.0, 1.0]
    assert target["groups"][0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("strict", [True, False])
def test_damage_leaves_the_template_untouched(path, strict):
    segment = path / "seg-000000.fps"
    content = bytearray(segment.read_bytes())
    sound = bytes(content)
    at = sound.index(state()["w"].numpy().tobytes(), 4096)
    content[at] ^= 1
    segment.write_bytes(content)
    target = template()
    with pytest.raises(FormatError, match="'w'"):
        load_into(path, target, strict=strict)
    assert not differences(target, template())
    segment.write_bytes(sound)
    load_into(path, target, strict=strict)
    assert not differences(target, state())


def test_attributes_stay_those_of_the_template(tmp_path):
    source = OrderedDict(a=torch.ones(1))
    source._metadata = {"version": 1}
    save(source, tmp_path / "c")
    target = OrderedDict(a=torch.zeros(1))
    target._metadata = {"version": 2, "more": 1}
    assert load_into(tmp_path / "c", target).loaded == ("a",)
    assert target._metadata == {"version": 2, "more": 1}


def test_keys_of_other_types_are_other_names(tmp_path):
    save({1: 1}, tmp_path / "c")
    report = load_into(tmp_path / "c", {"1": 2, True: 3}, strict=False)
    assert (report.missing, report.unexpected) == (("1", "~b1"), ("~i1",))


def test_a_tuple_at_the_root_takes_tensors_but_no_values(tmp_path):
    save((torch.ones(1), 5), tmp_path / "c")
    target = (torch.zeros(1), 5)
    load_into(tmp_path / "c", target)
    assert target[0] == 1
    with pytest.raises(PlanError, match="cannot be replaced"):
        load_into(tmp_path / "c", (torch.zeros(1), 6))
    root = torch.zeros(2)
    save(torch.ones(2), tmp_path / "t")
    load_into(tmp_path / "t", root)
    assert root.tolist() == [1.0, 1.0]


def test_a_template_that_contains_itself(path):
    target = {}
    target["x"] = target
    with pytest.raises(PlanError, match="contains itself"):
        load_into(path, target)


def test_a_part_of_the_checkpoint(tmp_path):
    model = torch.nn.Linear(3, 2)
    save({"model": model.state_dict(), "steps": [1, {"w": torch.ones(2)}]}, tmp_path / "c")
    other = torch.nn.Linear(3, 2)
    report = load_into(tmp_path / "c", other.state_dict(), key="model")
    assert report.loaded == ("weight", "bias")
    assert torch.equal(other.weight, model.weight)
    target = {"w": torch.zeros(2)}
    load_into(tmp_path / "c", target, key="steps/1")
    assert target["w"].all()
    with pytest.raises(PlanError, match="names no parts"):
        load_into(tmp_path / "c", target, key="modle")


def test_a_part_that_is_wholly_on_one_side_is_one_line(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "opt": {"a": [1, 2], "b": 3}}
    save(state, tmp_path / "c")
    with pytest.raises(PlanError) as caught:
        load_into(tmp_path / "c", {"model": {"w": torch.ones(2), "v": 1}})
    assert caught.value.problems == (
        "missing in the checkpoint: 'model/v'",
        "unexpected in the checkpoint: 'opt' with 3 values",
    )


@pytest.mark.parametrize("make", [lambda m: m, lambda m: torch.optim.SGD(m.parameters())])
def test_a_module_is_no_template(tmp_path, make):
    model = torch.nn.Linear(1, 1)
    save(model.state_dict(), tmp_path / "c")
    with pytest.raises(PlanError, match=r"state_dict\(\)"):
        load_into(tmp_path / "c", make(model))


def overlapping_templates():
    shared, line = torch.zeros(3), torch.zeros(5)
    return {
        "one_tensor_twice": {"a": shared, "b": shared},
        "overlapping_slices": {"a": line[:3], "b": line[2:]},
        "overlap_of_its_own": {"a": line.as_strided((3,), (0,)), "b": torch.zeros(3)},
        "array_of_one_element": {
            "a": np.lib.stride_tricks.as_strided(np.zeros(1, "f4"), (3,), (0,)),
            "b": torch.zeros(3),
        },
    }


@pytest.mark.parametrize("name", overlapping_templates())
def test_a_template_that_cannot_hold_both_values_is_refused(tmp_path, name):
    template = overlapping_templates()[name]
    first = np.ones(3, "f4") if name == "array_of_one_element" else torch.ones(3)
    save({"a": first, "b": torch.full((3,), 2.0)}, tmp_path / "c")
    with pytest.raises(PlanError, match="memory|overlaps"):
        load_into(tmp_path / "c", template)
    assert not any(value.any() for value in template.values())


def test_a_matrix_over_overlapping_rows_is_refused(tmp_path):
    save({"a": torch.arange(9.0).view(3, 3)}, tmp_path / "c")
    with pytest.raises(PlanError, match="overlaps itself"):
        load_into(tmp_path / "c", {"a": torch.zeros(5).as_strided((3, 3), (1, 1))})


def tied():
    flat = torch.arange(12.0)
    return {"a": flat, "b": flat, "part": flat[2:7], "x": flat.view(3, 4)[1:].t()}


@pytest.mark.parametrize("key", [None, "deep"])
def test_a_template_tied_as_the_checkpoint_is_filled(tmp_path, key):
    save(tied() if key is None else {"deep": tied(), "other": 1}, tmp_path / "c")
    template = tied()
    template["a"].zero_()
    load_into(tmp_path / "c", template, key=key)
    assert not differences(tied(), template)


def test_a_tied_template_takes_equal_copies(tmp_path):
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "c")
    weight = torch.zeros(3)
    load_into(tmp_path / "c", {"a": weight, "b": weight})
    assert weight.all()
