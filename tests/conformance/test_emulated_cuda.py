"""The emulated device against what torch documents of CUDA tensors, streams and generators (notes/cuda, torch.cuda)."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from shardproof.emulation import cuda, functions, memory
from shardproof.emulation.used_symbols import forget_used_symbols, used_symbols
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    forget_used_symbols()
    with cuda.emulated():
        yield


def host() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def device() -> torch.Tensor:
    return host().cuda()


class TestSides:
    def test_factories_are_on_the_host_unless_told(self) -> None:
        for made in (torch.ones(2), torch.tensor([1.0]), torch.empty(2), torch.randn(2), torch.as_tensor([1.0])):
            assert not made.is_cuda
            assert made.is_cpu
            assert made.device == torch.device("cpu")

    @pytest.mark.parametrize("name", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)])
    def test_every_way_to_name_the_device(self, name: object) -> None:
        assert torch.zeros(2, device=name).is_cuda  # type: ignore[call-overload]
        assert host().to(name).is_cuda  # type: ignore[call-overload]
        assert host().to(device=name).is_cuda  # type: ignore[call-overload]
        assert torch.empty_like(host(), device=name).is_cuda  # type: ignore[call-overload]
        assert torch.as_tensor(host(), device=name).is_cuda  # type: ignore[arg-type]

    def test_current_device_names_the_device(self) -> None:
        assert torch.zeros(2, device=torch.cuda.current_device()).is_cuda

    def test_there_is_one_device(self) -> None:
        assert torch.cuda.device_count() == 1
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(2, device="cuda:1")
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            host().cuda(1)

    def test_an_ordinal_alone_is_a_device(self) -> None:
        assert torch.device(0) == torch.device("cuda", 0)

    def test_autocast_of_the_device_is_refused_and_not_ignored(self) -> None:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
            pass
        with pytest.raises(NotImplementedError, match="autocast"), torch.autocast("cuda"):
            pass

    def test_versions_and_memory_are_answered_everywhere(self) -> None:
        assert torch.version.cuda
        assert torch.cuda.memory.mem_get_info() == torch.cuda.mem_get_info()

    def test_attributes_of_a_device_tensor(self) -> None:
        tensor = device()
        assert tensor.is_cuda
        assert not tensor.is_cpu
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.get_device() == 0
        assert host().get_device() == -1
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.half().type() == "torch.cuda.HalfTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert host().type() == "torch.FloatTensor"

    def test_type_can_move(self) -> None:
        moved = host().type("torch.cuda.HalfTensor")
        assert moved.is_cuda
        assert moved.dtype is torch.half
        assert not moved.type("torch.FloatTensor").is_cuda
        assert moved.type(torch.float32).is_cuda
        assert host().type_as(moved).is_cuda

    def test_a_copy_of_a_tensor_is_on_its_side(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would have us write clone().detach()
            assert torch.tensor(device()).is_cuda
            assert not torch.tensor(device(), device="cpu").is_cuda
        assert torch.as_tensor(device()).is_cuda
        assert torch.normal(device(), 1.0).is_cuda

    def test_views_casts_and_copies_keep_the_side(self) -> None:
        tensor = device()
        kept = {
            "slice": tensor[0], "view": tensor.view(3, 2), "flatten": tensor.flatten(), "transpose": tensor.t(),
            "narrow": tensor.narrow(0, 0, 1), "detach": tensor.detach(), "data": tensor.data, "clone": tensor.clone(),
            "float": tensor.half().float(), "to_dtype": tensor.to(torch.bfloat16), "bits": tensor.view(torch.int32),
            "empty_like": torch.empty_like(tensor), "zeros_like": torch.zeros_like(tensor), "new": tensor.new_zeros(2),
            "cat": torch.cat([tensor, tensor]), "stack": torch.stack([tensor, tensor]), "split": tensor.split(1)[1],
            "chunk": torch.chunk(tensor, 2)[0], "max": tensor.max(0).indices, "sum": tensor.sum(),
            "arithmetic": tensor * 2, "compare": tensor == tensor, "parameter": torch.nn.Parameter(tensor),
            "deepcopy": copy.deepcopy(tensor),
            "foreach": torch._foreach_mul([tensor], 2.0)[0], "aten": torch.ops.aten.add.Tensor(tensor, tensor),
            "in_place": tensor.add_(1), "contiguous": tensor.t().contiguous(),
        }  # fmt: skip
        assert [name for name, made in kept.items() if not made.is_cuda] == []

    def test_meta_is_neither(self) -> None:
        assert torch.empty(2, device="meta").device.type == "meta"
        assert device().to("meta").device.type == "meta"
        assert not torch.empty(2, device="meta").is_cuda

    def test_a_default_device_applies(self) -> None:
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda


class TestMemory:
    def crossings(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        other = "cpu" if tensor.is_cuda else "cuda"
        there = torch.empty(0, device=other)
        made = [tensor.to(other), tensor.to(device=other), tensor.to(there), torch.as_tensor(tensor, device=other)]
        made += [
            tensor.to(other, torch.float32),
            tensor.to(other, non_blocking=True),
            torch.asarray(tensor, device=other),
        ]
        return [*made, tensor.cpu() if tensor.is_cuda else tensor.cuda()]

    @pytest.mark.parametrize("on_device", [False, True])
    def test_a_crossing_never_aliases(self, on_device: bool) -> None:
        tensor = device() if on_device else host()
        before = tensor.clone()
        for made in self.crossings(tensor):
            assert made.is_cuda is not on_device
            made.fill_(-1)
            assert torch.equal(tensor, before)

    def test_a_view_of_a_view_does_not_cross(self) -> None:
        whole = host()
        part = whole[1:].view(-1).cuda()
        part.zero_()
        assert whole[1].tolist() == [3.0, 4.0, 5.0]

    def test_the_same_side_does_not_copy(self) -> None:
        for tensor in (host(), device()):
            assert tensor.to(tensor.device) is tensor
            assert tensor.to(tensor.dtype) is tensor
        assert device().cuda().is_cuda
        tensor = device()
        assert tensor.cuda() is tensor
        assert host().cpu().data_ptr() != 0

    def test_pinned_memory_is_a_copy_on_the_host(self) -> None:
        tensor = host()
        pinned = tensor.pin_memory()
        assert pinned.is_pinned()
        assert not pinned.is_cuda
        assert not tensor.is_pinned()
        assert pinned.data_ptr() != tensor.data_ptr()
        assert pinned.pin_memory() is pinned
        assert torch.empty(2, pin_memory=True).is_pinned()
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            device().pin_memory()
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.empty(2, device="cuda", pin_memory=True)

    def test_copy_crosses_by_value(self) -> None:
        target = torch.zeros(2, 3)
        target.copy_(device())
        assert not target.is_cuda
        assert target.tolist() == host().tolist()
        torch._foreach_copy_([target], [device() + 1])
        assert target[0, 0] == 1

    def test_a_module_moves(self) -> None:
        module = torch.nn.Linear(2, 2)
        weight = module.weight
        before = weight.data
        module.cuda()
        assert module.weight is weight
        assert weight.is_cuda
        weight.data.zero_()
        assert before.abs().sum() > 0
        assert not module.cpu().weight.is_cuda
        assert copy.deepcopy(module.to("cuda")).weight.is_cuda

    def test_numpy_needs_the_host(self) -> None:
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            device().numpy()
        assert device().cpu().numpy().shape == (2, 3)
        assert device().tolist() == host().tolist()

    def test_files_remember_the_side(self) -> None:
        file = io.BytesIO()
        torch.save({"device": device(), "host": host()}, file)
        for location, expected in ((None, True), ("cpu", False), ("cuda", True)):
            file.seek(0)
            loaded = torch.load(file, map_location=location)
            assert loaded["device"].is_cuda is expected
            assert loaded["host"].is_cuda is (location == "cuda")


class TestMixing:
    @pytest.mark.parametrize(
        "mix",
        [
            lambda a, b: a + b,
            lambda a, b: a.add_(b),
            lambda a, b: torch.mul(a, b),
            lambda a, b: torch.cat([a, b]),
            lambda a, b: torch.stack([a, b]),
            lambda a, b: torch.equal(a, b),
            lambda a, b: torch._foreach_add([a], [b]),
            lambda a, b: torch.where(a > 0, a, b),
            lambda a, b: torch.mul(a, a, out=b),
        ],
    )  # fmt: skip
    def test_host_and_device_do_not_mix(self, mix: object) -> None:
        for pair in ((host(), device()), (device(), host())):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mix(*pair)  # type: ignore[operator]

    def test_a_host_number_mixes(self) -> None:
        assert (device() + torch.tensor(1.0)).is_cuda
        assert (torch.tensor(1.0) * device()).is_cuda
        assert device().add_(torch.tensor(2.0)).is_cuda

    def test_a_device_number_does_not_mix_into_host_tensors(self) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            host() + torch.tensor(1.0, device="cuda")

    def test_indices(self) -> None:
        index = torch.tensor([0, 1])
        assert device()[index].is_cuda
        assert device()[index.cuda()].is_cuda
        with pytest.raises(RuntimeError, match="indices should be either on cpu"):
            host()[index.cuda()]
        tensor = device()
        tensor[0] = torch.ones(3)
        assert tensor[0].tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(RuntimeError, match="same device"):
            tensor[index] = torch.ones(2, 3)
        tensor[index] = torch.tensor(5.0)
        assert tensor.sum() == 30

    def test_shapes_of_others_may_be_read(self) -> None:
        assert device().view_as(torch.empty(3, 2)).is_cuda
        assert device().sum(0).expand_as(host()).is_cuda

    def test_a_gradient_lies_with_its_parameter(self) -> None:
        param = torch.nn.Parameter(device())
        with pytest.raises(RuntimeError, match="different device"):
            param.grad = host()
        param.grad = device()
        assert param.grad.is_cuda


class TestAutograd:
    def test_gradients_and_optimizer_state_are_on_the_device(self) -> None:
        module = torch.nn.Linear(3, 2).cuda()
        module(device()).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.is_cuda
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.step()
        state = optimizer.state[module.weight]
        assert state["exp_avg"].is_cuda
        assert not state["step"].is_cuda  # torch keeps it on the host unless capturable or fused

    @pytest.mark.parametrize("start", ["method", "function", "grad", "engine", "checkpoint"])
    def test_backward_runs_python_on_the_device(self, start: str) -> None:
        seen: list[bool] = []

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)  # type: ignore[attr-defined]
                return x * 2

            @staticmethod
            def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
                seen.extend([x.is_cuda, grad.is_cuda, (grad * x).is_cuda, grad.new_zeros(2).is_cuda])
                return grad * 2

        x = device().requires_grad_()
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.is_cuda))  # type: ignore[union-attr]
        loss = Twice.apply(x).sum()
        match start:
            case "method":
                loss.backward()
            case "function":
                torch.autograd.backward([loss])
            case "grad":
                (grad,) = torch.autograd.grad(loss, x)
                seen.append(grad.is_cuda)
            case "engine":
                torch.autograd.Variable._execution_engine.run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            case "checkpoint":
                function = torch.utils.checkpoint.checkpoint
                function(lambda t: Twice.apply(t).sum(), x, use_reentrant=True).backward()
        assert seen == [True] * 5

    def test_a_backward_pass_on_the_host_stays_there(self) -> None:
        seen: list[bool] = []
        x = host().requires_grad_()
        y = x * 2
        y.register_hook(lambda grad: seen.append((grad * 2).is_cuda))  # type: ignore[no-untyped-call]
        y.sum().backward()
        assert x.grad is not None
        assert seen == [False]
        assert not (x.grad + x).is_cuda

    def test_gradients_cross_with_their_tensors(self) -> None:
        x = host().requires_grad_()
        x.cuda().square().sum().backward()
        assert x.grad is not None
        assert not x.grad.is_cuda
        assert x.grad.tolist() == (2 * host()).tolist()


class TestRandom:
    def test_the_two_generators_are_independent(self) -> None:
        torch.manual_seed(1)
        first = torch.randn(4)
        torch.manual_seed(1)
        torch.randn(100, device="cuda")
        torch.empty(3, device="cuda").normal_()
        torch.nn.functional.dropout(device())
        torch.nn.init.xavier_uniform_(device())
        assert torch.equal(torch.randn(4), first)

    def test_a_seed_gives_other_numbers_on_the_device(self) -> None:
        torch.manual_seed(1)  # seeds both, as torch does
        assert not torch.equal(torch.randn(4), torch.randn(4, device="cuda").cpu())

    def test_state_of_the_device(self) -> None:
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.randn(4, device="cuda")
        assert not state.is_cuda
        assert not torch.equal(torch.randn(4, device="cuda"), first)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.randn(4, device="cuda"), first)
        torch.cuda.default_generators[0].set_state(state)
        assert torch.equal(torch.randn(4, device="cuda"), first)
        assert torch.cuda.initial_seed() == 7

    def test_a_named_generator_is_used(self) -> None:
        state = torch.cuda.get_rng_state()
        generator = torch.cuda.default_generators[0]
        first = torch.randn(4, device="cuda", generator=generator)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.randn(4, device="cuda"), first)


class TestSymbols:
    def test_streams_and_events_do_nothing(self) -> None:
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            made = device()
            made.record_stream(stream)
        stream.wait_stream(torch.cuda.current_stream())
        event.record(stream)
        torch.cuda.default_stream().wait_event(stream.record_event())
        torch.cuda.synchronize()
        assert event.query()
        assert stream.query()
        assert event.elapsed_time(torch.cuda.Event()) == 0.0
        with torch.cuda.device(0), torch.cuda.nvtx.range("x"):
            torch.cuda.set_device("cuda:0")

    def test_deferred_calls_run_at_once(self) -> None:
        called: list[int] = []
        torch.cuda._lazy_call(lambda: called.append(1))
        assert called == [1]
        assert torch.cuda.is_initialized()

    def test_what_was_touched_is_recorded(self) -> None:
        assert used_symbols() == ()
        torch.cuda.current_stream()
        _ = torch.zeros(2, device="cuda").is_cuda
        host().cuda().cpu()
        assert used_symbols() == (
            "Tensor.cpu", "Tensor.cuda", "Tensor.is_cuda", "device=cuda in torch.zeros", "torch.cuda.current_stream",
        )  # fmt: skip
        forget_used_symbols()
        assert used_symbols() == ()

    def test_host_work_touches_nothing(self) -> None:
        module = torch.nn.Linear(2, 2)
        module(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert [symbol for symbol in used_symbols() if "cuda.synchronize" not in symbol] == []


class TestLifetime:
    def test_reentrant(self) -> None:
        with cuda.emulated(), cuda.emulated():
            assert device().is_cuda
        assert device().is_cuda

    def test_threads_started_inside_see_the_device(self) -> None:
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(device().is_cuda))
        thread.start()
        thread.join()
        assert seen == [True]

    def test_a_forked_child_is_inside(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other tests' threads, which the child does not need
            child = os.fork()
        if child == 0:
            with cuda.emulated():
                os._exit(0 if device().is_cuda and torch.cuda.is_available() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_our_own_code_can_ask(self) -> None:
        assert cuda.is_device(device())
        assert not cuda.is_device(device().cpu())


LEAVING = """
import threading, torch
from shardproof.emulation import cuda, symbols
owners = [(o, n) for o, n, _ in symbols.replacements()]
owners += [(threading.Thread, "start"), (torch.autograd, "_engine_run_backward")]
before = [o.__dict__.get(n, "absent") for o, n in owners]
over, sides = threading.Event(), []
def outlive():
    over.wait()
    sides.append(kept.clone().is_cuda)
worker = threading.Thread(target=outlive)
try:
    with cuda.emulated():
        kept = torch.ones(2, device="cuda")
        worker.start()
        raise KeyError
except KeyError:
    pass
after = [o.__dict__.get(n, "absent") for o, n in owners]
assert all(a is b for a, b in zip(before, after)), "a symbol stayed replaced"
assert not torch.cuda.is_available() and not torch.ones(2).is_cuda
assert torch.overrides._get_current_function_mode_stack() == []
assert not kept.is_cuda and kept.device.type == "cpu" and cuda.is_device(kept)
over.set()
worker.join()
assert sides == [True], "a thread started inside keeps sides until it ends"
with cuda.emulated():
    assert kept.is_cuda, "the side outlives the block"
"""


class TestCanaries:
    """An emulation that lies is noticed by the tests above."""

    @pytest.mark.parametrize("on_device", [False, True])
    def test_one_memory_for_both_sides(self, monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
        monkeypatch.setattr(functions, "_aliases", lambda one, other: False)
        with pytest.raises(AssertionError):
            TestMemory().test_a_crossing_never_aliases(on_device)

    def test_views_that_forget_their_side(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensor = device()
        monkeypatch.setattr(memory, "storage_of", lambda tensor: None)
        with pytest.raises(AssertionError):
            assert tensor[0].is_cuda

    def test_a_device_that_takes_what_lies_on_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(functions, "_side_of_inputs", lambda *_: memory.Side.DEVICE)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            TestMixing().test_host_and_device_do_not_mix(lambda host, device: host + device)


def test_after_the_block_torch_is_as_it_was() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", LEAVING], check=True)


class TestMachines:
    """Outside of the block that every other test is in: the outermost one says which machine there is."""

    SCRIPT = """
import torch
from shardproof.emulation import cuda
from shardproof.emulation.machine import Kind

with cuda.emulated(4, Kind((9, 0), 1 << 20)):
    assert torch.cuda.device_count() == 4
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.mem_get_info() == (1 << 20, 1 << 20)
    torch.cuda.set_device(2)
    here = torch.ones(1, device="cuda:2")
    assert here.device == torch.device("cuda", 2)
    assert torch.cuda.current_device() == here.get_device() == 2
    torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(1)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    for ordinal, error in ((3, NotImplementedError), (4, RuntimeError)):
        try:
            torch.ones(1, device=ordinal)
        except error as refusal:
            print(refusal)
with cuda.emulated():
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
"""

    def test_a_rank_uses_one_of_several_devices(self) -> None:
        done = subprocess.run([sys.executable, "-c", self.SCRIPT], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "this process uses cuda:2" in done.stdout
        assert "the emulated machine has cuda:0 to cuda:3" in done.stdout


class TestWhatAutogradSaves:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activations_are_recomputed_on_the_device(self, reentrant: bool) -> None:
        """torch compares the device of what the first forward saved with that of what the second one saves."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)).cuda()
        given = torch.randn(3, 4).cuda().requires_grad_()
        wanted = torch.autograd.grad(model(given).square().sum(), [given, *model.parameters()])
        checkpoint(model, given, use_reentrant=reentrant).square().sum().backward()
        assert given.grad is not None
        assert torch.equal(given.grad, wanted[0])
        for parameter, gradient in zip(model.parameters(), wanted[1:], strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)

    def test_hooks_see_the_device(self) -> None:
        seen = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor.device.type)
            return tensor.cpu()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.cuda()):
            made = device().requires_grad_().relu()
        made.sum().backward()
        assert seen == ["cuda"]
