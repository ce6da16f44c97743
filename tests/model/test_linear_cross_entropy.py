"""harness/model/cross_entropy.py, checked against torch's own linear and cross_entropy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.model import cross_entropy
from harness.model.cross_entropy import (
    CHUNK_LOGITS,
    chunk_rows,
    eager_kernel,
    fused_kernel,
    linear_cross_entropy,
    token_cross_entropies,
)
from tests.model.test_kernels import printed_by


def inputs(rows: int, dim: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, weight and targets. The logits have a standard deviation near 3, as in a trained model."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + dim * 1009 + vocab)
    features = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=generator, dtype=torch.float64) * 3 / dim**0.5).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    return features, weight.requires_grad_(), targets


def reference(features: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """Return the mean cross-entropy of softcap * tanh(logits / softcap), or of the logits if `softcap` is None."""
    logits = F.linear(features, weight)
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), targets)


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("softcap", [None, 0.5, 4.0])
@pytest.mark.parametrize(
    ("rows", "dim", "vocab", "chunk_logits"),
    [
        pytest.param(1, 1, 2, 2, id="least"),
        pytest.param(5, 4, 9, 1, id="a chunk smaller than one row"),
        pytest.param(64, 16, 101, 64 * 101, id="one chunk"),
        *(pytest.param(65, 3, 1009, chunk * 1009, id=f"ragged after {chunk}") for chunk in (1, 2, 7, 64)),
    ],
)
def test_equals_the_reference_in_fp64(
    monkeypatch: pytest.MonkeyPatch, rows: int, dim: int, vocab: int, chunk_logits: int, softcap: float | None
) -> None:
    """Loss and gradients equal the reference's. The gradients are multiplied by the incoming gradient, and the inputs
    are unchanged."""
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", chunk_logits)
    features, weight, targets = inputs(rows, dim, vocab)
    before = [tensor.detach().clone() for tensor in (features, weight, targets)]
    loss = linear_cross_entropy(features, weight, targets, softcap=softcap)
    expected = reference(features, weight, targets, softcap)
    assert loss.dtype == torch.float64
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    rows_alone = token_cross_entropies(features, weight, targets, softcap=softcap)
    torch.testing.assert_close(rows_alone.mean(), expected, rtol=1e-12, atol=0)
    ours, theirs = gradients(3.5 * loss, features, weight), gradients(3.5 * expected, features, weight)
    for actual, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-14)
        assert relative_error(actual, wanted) < 1e-12
    for tensor, earlier in zip((features, weight, targets), before, strict=True):
        assert torch.equal(tensor, earlier)


def test_a_second_backward_pass_is_refused_or_right() -> None:
    """A second backward pass raises an error or returns the same gradients. The gradient of the weight is multiplied by
    the incoming gradient in place, to save memory, and this must not happen twice."""
    features, weight, targets = inputs(6, 4, 9)
    loss = 3 * linear_cross_entropy(features, weight, targets)
    first = [g.clone() for g in torch.autograd.grad(loss, (features, weight), retain_graph=True)]
    try:
        again = gradients(loss, features, weight)
    except RuntimeError as error:
        assert "inplace" in str(error)  # noqa: PT017 - this code may also raise nothing
        return
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["features", "weight", "both"])
def test_only_what_needs_a_gradient_has_one(monkeypatch: pytest.MonkeyPatch, frozen: str) -> None:
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 4 * 9)
    features, weight, targets = inputs(6, 4, 9)
    features.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "features")
    loss, expected = linear_cross_entropy(features, weight, targets), reference(features, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        leaf = weight if frozen == "features" else features
        torch.testing.assert_close(gradients(loss, leaf), gradients(expected, leaf), rtol=1e-12, atol=1e-15)
        with torch.no_grad():
            unwanted = linear_cross_entropy(features, weight, targets)
        assert (unwanted.requires_grad, unwanted.item()) == (False, loss.item())


def test_huge_logits_neither_overflow_nor_lose_the_loss() -> None:
    features, weight, targets = inputs(6, 4, 9, torch.float32)
    loss = linear_cross_entropy(features * 1e4, weight, targets)
    torch.testing.assert_close(loss, reference(features * 1e4, weight, targets))
    assert all(torch.isfinite(gradient).all() for gradient in gradients(loss, features, weight))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "features_dtype", "softcap"),
    [
        (torch.float32, 1e-5, torch.float32, None),
        (torch.bfloat16, 0.02, torch.float32, None),
        (torch.bfloat16, 0.02, torch.bfloat16, None),
        (torch.bfloat16, 0.02, torch.float32, 8.0),
        (torch.float16, 0.003, torch.float32, None),
        (torch.float16, 0.003, torch.float16, None),
        (torch.float16, 0.003, torch.float32, 8.0),
    ],
)
def test_every_precision_is_close_to_the_truth(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tolerance: float,
    features_dtype: torch.dtype,
    softcap: float | None,
) -> None:
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 10 * 1009)
    features, weight, targets = inputs(64, 32, 1009, torch.float32)
    truth = reference(features.double(), weight.double(), targets, softcap)
    with nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(features.to(features_dtype), weight, targets, softcap=softcap)
    assert loss.dtype == torch.float32
    assert relative_error(loss, truth) < tolerance / 10
    ours, theirs = gradients(loss, features, weight), gradients(truth, features, weight)
    for actual, wanted in zip(ours, theirs, strict=True):
        assert actual.dtype == torch.float32, "gradients of fp32 leaves are fp32"
        assert relative_error(actual, wanted) < tolerance


@pytest.mark.slow
def test_fp16_with_a_loss_scale_neither_underflows_nor_overflows() -> None:
    """With a loss scale, gradients in fp16 are near the reference's. Without it, with GPT-2's vocabulary and 1,024
    rows, the elements of the logits' gradient are near 2e-8, which is below fp16's smallest number (6e-8)."""
    features, weight, targets = inputs(1024, 8, 50257, torch.float32)
    truth = gradients(reference(features, weight, targets), features, weight)
    scale = 2.0**16
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(features, weight, targets)
    scaled = gradients(loss * scale, features, weight)
    for actual, wanted in zip(scaled, truth, strict=True):
        assert torch.isfinite(actual).all()
        assert relative_error(actual / scale, wanted) < 0.01
    # Tokens that are never a target only get gradients from small probabilities, which underflow first.
    rare = torch.ones(weight.shape[0], dtype=torch.bool)
    rare[targets] = False
    assert relative_error(scaled[1][rare] / scale, truth[1][rare]) < 0.02


def test_fp16_does_not_overflow_with_a_small_vocabulary_and_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a frequent token does not overflow in fp16. It is a sum over the rows of a chunk. If only the
    number of logits limited a chunk, all rows of a small vocabulary would be one chunk on a GPU."""
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", CHUNK_LOGITS["cuda"])
    rows, vocab = 2**17, 16
    features, weight = torch.ones(rows, 2, requires_grad=True), torch.zeros(vocab, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(features, weight, torch.zeros(rows, dtype=torch.int64))
    _, actual = gradients(loss, features, weight)
    torch.testing.assert_close(actual[0], torch.full((2,), 1 / vocab - 1), rtol=1e-3, atol=0)


# Compiled


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (65, 1009), (128, 256)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_formulations_of_the_elementwise_part_agree(
    rows: int, vocab: int, dtype: torch.dtype, softcap: float
) -> None:
    """Both kernels equal the reference for logits padded to whole tiles, whatever values the padding has."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    width = -(-vocab // 128) * 128
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64) * 3
    logits, targets = logits.to(dtype), torch.arange(rows) * 7 % vocab
    valid = logits[:, :vocab].to(exact).requires_grad_()
    capped = softcap * torch.tanh(valid / softcap) if softcap else valid
    expected = F.cross_entropy(capped, targets, reduction="none")
    expected.sum().backward()
    assert valid.grad is not None
    rounding = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3 if softcap else 4e-3}[dtype]
    for kernel in (eager_kernel, fused_kernel):
        errors, losses = logits.clone(), torch.empty(rows, dtype=exact)
        kernel(errors, targets, losses, vocab, True, softcap)
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(errors[:, :vocab].to(exact), valid.grad, rtol=rounding, atol=rounding)
        assert errors[:, vocab:].count_nonzero() == 0
        without = torch.empty_like(losses)
        kernel(logits.clone(), targets, without, vocab, False, softcap)
        assert torch.equal(without, losses)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1024, 13_312, 65_536, 65_537])
def test_chunks_are_whole_tiles_and_nearly_equal(rows: int) -> None:
    step = chunk_rows(rows, 50_304, "cuda")
    assert step % 128 == 0
    assert step * 50_304 <= CHUNK_LOGITS["cuda"]
    chunks = -(-rows // step)
    assert chunks == -(-rows // (CHUNK_LOGITS["cuda"] // 50_304 // 128 * 128)), "more chunks than needed"
    assert step - (rows - (chunks - 1) * step) < 128 * chunks


@pytest.fixture
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the kernel with the backend "aot_eager", which is fast because it only traces and generates no machine
    code. Chunks have 128 rows of up to 1,152 logits."""
    torch._dynamo.reset()
    kernel = torch.compile(fused_kernel, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(cross_entropy, "_compile", lambda: kernel)
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 128 * 1152)
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_one_program_serves_all_numbers_of_rows(compiled_kernels: None) -> None:
    """The kernel is compiled once for all numbers of rows, and once more for use without gradients. The rows are always
    split into chunks of 128, of which the last one may have fewer."""
    loss = torch.compile(linear_cross_entropy, dynamic=True, backend="aot_eager")
    programs = []
    for rows in (200, 512, 64, 1):
        features, weight, targets = inputs(rows, 8, 1009, torch.float32)
        expected = reference(features, weight, targets)
        actual = loss(features, weight, targets)
        torch.testing.assert_close(actual, expected)
        ours, theirs = gradients(actual, features, weight), gradients(expected, features, weight)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        programs.append(kernel_programs())
    assert programs == [1] * 4
    with torch.no_grad():
        for rows in (200, 300):
            features, weight, targets = inputs(rows, 8, 1009, torch.float32)
            torch.testing.assert_close(loss(features, weight, targets), reference(features, weight, targets))
    assert kernel_programs() == 2, "one program with gradients and one without"


def kernel_programs() -> int:
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(fused_kernel.__code__))


@pytest.mark.slow
def test_autocast_is_seen_by_a_compiled_loss(compiled_kernels: None) -> None:
    features, weight, targets = inputs(130, 8, 1009, torch.float32)
    loss = torch.compile(linear_cross_entropy, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = loss(features, weight, targets), linear_cross_entropy(features, weight, targets)
    assert actual.dtype == torch.float32
    assert abs(actual.item() - reference(features, weight, targets).item()) > 1e-7
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    for one, other in zip(gradients(actual, features, weight), gradients(expected, features, weight), strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other) < 2e-3


VERSIONS = """
import importlib, json, sys, torch
from pathlib import Path
from torch._inductor.utils import fresh_cache

folder = Path(sys.argv[0]).parent
sys.path.insert(0, str(folder))
source = Path("harness/model/cross_entropy.py").read_text()
features, targets, found = torch.ones(8, 4), torch.arange(8), []
with fresh_cache():
    for factor in (2, 6):
        changed = source.replace("scale = grad_loss", f"scale = {factor} * grad_loss")
        (folder / f"version_{factor}.py").write_text(changed)
        version = importlib.import_module(f"version_{factor}")
        weight = torch.ones(16, 4, requires_grad=True)
        torch.compile(version.linear_cross_entropy)(features, weight, targets).backward()
        found.append(weight.grad.norm().item())
        torch.compiler.reset()
print(json.dumps(found[1] / found[0]))
"""


@pytest.mark.slow
def test_a_changed_backward_pass_is_compiled_anew() -> None:
    """torch's cache of compiled code is on the disk, and outlives an update of the program."""
    assert printed_by(VERSIONS) == pytest.approx(3)


def test_there_are_no_second_derivatives() -> None:
    features, weight, targets = inputs(6, 4, 9)
    first = torch.autograd.grad(linear_cross_entropy(features, weight, targets), features, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        first.sum().backward()


MEASURE = """
import json, re, torch, torch.nn.functional as F
from harness.model.cross_entropy import linear_cross_entropy

def peak():
    # Not resource.getrusage: its ru_maxrss is inherited from the parent.
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) / 1024

torch.set_num_threads(1)
reference = lambda f, w, t: F.cross_entropy(F.linear(f, w), t)
features = torch.randn(2048, 16, requires_grad=True)
weight = torch.randn(50257, 16, requires_grad=True)
targets, found = torch.randint(50257, (2048,)), []
for loss in (linear_cross_entropy, reference):  # the larger peak is the second's
    loss(features[:4], weight, targets[:4]).backward()
    before = peak()
    loss(features, weight, targets).backward()
    found.append(peak() - before)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status for the peak memory")
def test_peak_memory_is_far_below_the_references() -> None:
    """The peak memory is less than a third of the reference's. 2,048 x 50,257 logits in fp32 take 393 MiB. torch's own
    loss keeps at least two such tensors, while a chunk takes 64 MiB. MEASURE runs both losses in one process, ours
    first. Its second number is only the part of the reference's peak that exceeds ours, so the sum of both numbers is
    the reference's peak."""
    ours, added = printed_by(MEASURE)
    assert ours < 350
    assert ours + added > 700
    assert ours < (ours + added) / 3


def test_half_precision_on_the_cpu_has_chunks_of_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision a chunk has more rows than in fp32, and at most as many bytes."""
    rows, vocab = 2048, 50_257
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 2**24)
    assert chunk_rows(rows, vocab, "cpu", torch.bfloat16) > 1.5 * chunk_rows(rows, vocab, "cpu", torch.float32)
    assert 2 * vocab * chunk_rows(rows, vocab, "cpu", torch.bfloat16) <= 4 * CHUNK_LOGITS["cpu"]
