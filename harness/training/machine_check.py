"""Rates of a machine, measured before anything is trained on it (check_machine.py). All ranks measure their devices at
the same time, because they also train at the same time."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch

from harness.common.device import idle_gpus
from harness.common.errors import RunError, os_errors_as
from harness.common.files import replace_text
from harness.common.memory import free_memory
from harness.common.messages import GIB, REASON_CHARACTERS, aligned, paragraph
from harness.common.program import program_versions
from harness.data.loader import Microbatch
from harness.distributed.rendezvous import connection_errors_as_peer_errors
from harness.distributed.signals import StopRequest
from harness.distributed.watchdog import Place
from harness.distributed.world import World, say
from harness.model.precision import DTYPES, Precision
from harness.model.weights import check_memory
from harness.planning.experiment import Experiment
from harness.runs.results import now
from harness.runs.throughput import BELIEVED_SECONDS, BELIEVED_STEPS, Measured, peak_flops
from harness.runs.train_config import TrainConfig
from harness.training.compile_cache import CompileCache
from harness.training.failures import explained_failures
from harness.training.startup import remark_on_machine
from harness.training.step import build_training_step

MACHINE = Place(0, "machine")  # of the watchdog, for all measurements
SECONDS = 2.0  # for each rate of a device
ROUNDS = 3  # a rank is reported if it is slow in this many measurements in a row
# A rank is slow if a rate of its device is below this fraction of the median of all ranks. Copies from the host's
# memory also vary with the processor on which the rank happens to run, so their fraction is smaller. A link with half
# its lanes is still below it.
SLOW = {"products": 0.9, "copies": 0.9, "from_host": 0.6}
NAME_CHARACTERS = 24  # of a device in the table
EXCHANGE_SECONDS = 0.5  # for each size of all-reduces
DISK_SECONDS, DISK_BYTES, DISK_PART_BYTES = 3.0, 2**30, 2**26
DOWNLOAD_SECONDS, DOWNLOAD_BYTES, ANSWER_SECONDS = 4.0, 2**30, 4.0
DOWNLOADED = "openai-community/gpt2/resolve/main/model.safetensors"
LONGEST_SECONDS = 40.0  # after which no more training steps are begun, even if fewer than BELIEVED_STEPS are done


@dataclass(frozen=True)
class DeviceRates:
    """A rank's device and its rates."""

    host: str
    name: str
    free_bytes: int
    total_bytes: int
    precision: str  # of the products: the one that training chooses here for "auto"
    products: float  # FLOP/s
    copies: float  # bytes read and written per second
    from_host: float | None  # bytes per second; None on a CPU


def report_machine(experiment: Experiment | None, folder: Path) -> None:
    """Measure this machine and print its rates. `folder` is where checkpoints go. With an experiment, also measure its
    training. Collective: joins the other ranks, and leaves them at the end.

    Raises RunError if a rank is slow, or if a measurement other than the download fails. Raises UserError if
    the host's memory cannot hold the weights, or if this machine cannot compute what train.json demands.
    """
    world = World.join()

    def show(text: str) -> None:
        say(world, "\n".join(paragraph(text)))

    with naming_the_rank(world):
        if experiment is not None:
            remark_on_machine(experiment, world)
        elif remark := idle_gpus(world.device, world.local_size):
            show(f"note: {remark}")
        rates, slow = measure_devices(world)
        say(world, "\n".join(table(rates)))
        if driver := program_versions().get("nvidia_driver"):
            show(f"driver {driver}")
        if world.size > 1:
            # Bus bandwidth is the number that NCCL's tests compare with the hardware: 2 (n - 1) / n times the bytes per
            # second of an all-reduce over n ranks (github.com/NVIDIA/nccl-tests, PERFORMANCE.md).
            share, texts = 2 * (world.size - 1) / world.size, []
            for size in exchanged_sizes(experiment):
                rate = share * size / world.all_reduce_seconds(size, EXCHANGE_SECONDS)
                texts.append(f"{size / 2**20:.3g} MiB {three_digits(rate / 1e9)}")
            show(f"all-reduce of {world.size} ranks, bus GB/s: {', '.join(texts)}")
        show(world.on_rank0(lambda: describe_disk(folder)))
        show(world.on_rank0(describe_download))
        if experiment is not None:
            measured = measure_training(experiment, world)
            over = f"{measured.global_steps:,} steps in {measured.seconds:,.1f} s"
            show(f"training {experiment.run.path.name}: {measured.tokens_per_second:,.0f} tokens/s ({over})")
        if slow:
            raise world.collective_error(f"{'; '.join(slow)}: end other programs there, or rent another machine")
    world.leave()


@contextmanager
def naming_the_rank(world: World) -> Iterator[None]:
    """Context manager that turns RuntimeError and MemoryError into RunError with rank, host and device. A lost
    connection to another rank becomes the error of `connection_errors_as_peer_errors` instead."""
    try:
        with connection_errors_as_peer_errors():
            yield
    except (RuntimeError, MemoryError) as error:
        reason = [*str(error).splitlines(), type(error).__name__][0][:REASON_CHARACTERS].rstrip(". ")
        where = f"rank {world.rank} ({socket.gethostname()}, {world.device})"
        raise RunError(f"{where}: {reason}; if that happens again, rent another machine") from None


def measure_device(world: World) -> DeviceRates:
    """Measure this rank's device while all other ranks measure theirs. Collective."""
    device = world.device
    is_gpu = device.type == "cuda"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, total = torch.cuda.mem_get_info() if is_gpu else (free_memory(), total)
    width, size = (8192, 2**28) if is_gpu else (1024, 2**26)
    precision = Precision.for_training("auto", device).name
    matrix = torch.randn(width, width, device=device, dtype=DTYPES[precision])
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def rate(work: Callable[[], object], amount: int) -> float:
        """Return the amount of work done per second, measured for SECONDS. One call of `work` does `amount`.
        Collective."""

        def run(calls: int) -> int:
            with world.watchdog.guard(MACHINE):
                for _ in range(calls):
                    work()
                wait_for(device)
            return calls

        run(2)  # the first call loads kernels
        world.barrier()
        count, began = 0, time.perf_counter()
        # The mean, because a device that slows down when it is hot is slow in training.
        while (elapsed := time.perf_counter() - began) < SECONDS or not count:
            count += run(10 if is_gpu else 1)
        return amount * count / elapsed

    products = rate(lambda: matrix @ matrix, 2 * width**3)
    copies = rate(lambda: target.copy_(source), 2 * size)
    from_host = None
    if is_gpu:
        pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        from_host = rate(lambda: target.copy_(pinned, non_blocking=True), size)
    return DeviceRates(socket.gethostname(), world.device_name, free, total, precision, products, copies, from_host)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_devices(world: World) -> tuple[list[DeviceRates], list[str]]:
    """Return the rates of every rank's device, and a text for each rate that was slow in all of ROUNDS measurements.
    Collective."""
    rates = world.gather(measure_device(world))
    slow = slow_rates(rates)
    # Another program may slow a rank for a moment. A bad device stays slow.
    for _ in range(ROUNDS - 1):
        if slow:
            rates = world.gather(measure_device(world))
            again = slow_rates(rates)
            slow = {key: again[key] for key in slow if key in again}
    words = {"products": "matrix products", "copies": "copies", "from_host": "copies from the host"}
    return rates, [
        f"rank {rank} ({rates[rank].host}): {words[what]} {below:.0%} below the median"
        for (rank, what), below in sorted(slow.items())
    ]


def slow_rates(rates: Sequence[DeviceRates]) -> dict[tuple[int, str], float]:
    """Return, by rank and name of the rate, the fraction by which each slow rate is below the median of all ranks."""
    found: dict[tuple[int, str], float] = {}
    for what, least in SLOW.items():
        values = {rank: value for rank, each in enumerate(rates) if (value := getattr(each, what)) is not None}
        median = statistics.median_high(values.values()) if values else 0.0  # of two ranks, the faster
        found |= {(rank, what): 1 - value / median for rank, value in values.items() if value < least * median}
    return found


def describe_disk(folder: Path) -> str:
    """Write a temporary file in `folder` to disk, read it back, and return both rates as text. Raises RunError if the
    disk cannot be measured."""
    part = os.urandom(DISK_PART_BYTES)
    remedy = " while the disk was measured; free some space there, or rent another machine"
    # A file without a name is gone however this process ends.
    with os_errors_as(RunError, str(folder), remedy), tempfile.TemporaryFile(dir=folder) as file:

        def rate(work: Callable[[], int]) -> tuple[int, float]:
            """Call `work` until it returns 0, or until DISK_BYTES or DISK_SECONDS are reached. `work` returns the
            number of bytes that it moved. Return the bytes of all calls, and the bytes per second."""
            count, began = 0, time.perf_counter()
            while count < DISK_BYTES and time.perf_counter() - began < DISK_SECONDS and (size := work()):
                count += size
            return count, count / (time.perf_counter() - began)

        def write() -> int:
            file.write(part)
            file.flush()
            os.fsync(file.fileno())
            return len(part)

        count, writes = rate(write)
        if hasattr(os, "posix_fadvise"):  # so that it is read from the disk; macOS lacks the call
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        _, reads = rate(lambda: len(file.read(len(part))))
    return f"disk at {folder}: writes {writes / 1e9:.2f} GB/s, reads {reads / 1e9:.2f} GB/s ({count / 2**20:,.0f} MiB)"


def describe_download() -> str:
    """Download from the Hub for some seconds, and return the rate as text, or why it was not measured."""
    from huggingface_hub import constants

    found = ["not measured: no answer in time"]

    def download() -> None:
        count, began = 0, time.perf_counter()
        try:
            if constants.HF_HUB_OFFLINE:
                raise OSError("HF_HUB_OFFLINE is set")
            with urllib.request.urlopen(f"{constants.ENDPOINT}/{DOWNLOADED}", timeout=ANSWER_SECONDS) as answer:
                began = time.perf_counter()
                while count < DOWNLOAD_BYTES and time.perf_counter() - began < DOWNLOAD_SECONDS:
                    if not (part := answer.read1(2**20)):  # returns what has arrived, without waiting for more
                        break
                    count += len(part)
            rate = count / (time.perf_counter() - began)
            found[0] = f"{three_digits(rate / 1e6)} MB/s over one connection"
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            found[0] = f"not measured: {getattr(reason, 'strerror', None) or reason}"

    # In a thread that is given up, because looking up a name or trying all its addresses can take a minute.
    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS + ANSWER_SECONDS)
    return f"download from {constants.ENDPOINT}: {found[0]}"


def measure_training(experiment: Experiment, world: World) -> Measured:
    """Train a new model of the experiment on random tokens at learning rate 0, and return the speed. Rank 0 writes the
    speed into the run's folder, for --plan. Collective."""
    config, layout = experiment.config, experiment.layout(world.size)
    precision = Precision.for_training(config.precision, world.device).name
    step_config = config.model_copy(update={"precision": precision})
    check_memory(experiment.model)
    with explained_failures(config.microbatch_size, StopRequest()):
        step = build_training_step(experiment, step_config, world, place=MACHINE)
        cache = CompileCache.of(experiment, step_config, world)
        cache.load()
        length = experiment.model.context_length
        tokens = np.random.default_rng(0).integers(0, experiment.model.vocab_size, layout.microbatch_size * length + 1)
        microbatch = Microbatch.consecutive(tokens, length)
        step.warm_up(microbatch, world, MACHINE)

        def seconds_of(steps: int) -> float:
            world.barrier()
            began = time.perf_counter()
            with world.watchdog.guard(MACHINE):
                for _ in range(steps):
                    step.run([microbatch] * layout.accumulation_steps, 0.0)
                wait_for(world.device)
            return max(world.gather(time.perf_counter() - began))

        seconds_of(1)  # which is slower than the others
        cache.save()  # so that the run compiles nothing
        steps, seconds, count = 0, 0.0, 1
        while seconds < LONGEST_SECONDS and (steps < BELIEVED_STEPS or seconds < BELIEVED_SECONDS):
            took = seconds_of(count)
            steps, seconds, count = steps + count, seconds + took, math.ceil(count / took)  # about a second
        measured = Measured(global_steps=steps, tokens=steps * layout.global_tokens, seconds=seconds)
    contents = {
        "date": now(),
        "device": world.device_name,
        "world_size": world.size,
        "microbatch_size": layout.microbatch_size,
        "accumulation_steps": layout.accumulation_steps,
        "tokens_per_second": measured.tokens_per_second,
        "measured": measured.model_dump(),
        "model": experiment.model.model_dump(mode="json"),
        "train": config.model_dump(mode="json"),
    }
    world.on_rank0(lambda: replace_text(experiment.run.machine_check, json.dumps(contents, indent=4) + "\n"))
    return measured


def exchanged_sizes(experiment: Experiment | None) -> list[int]:
    """Return the sizes in bytes to measure all-reduces with: 1 MiB, one of DDP's buckets, and the token embedding's
    gradient if larger than a bucket. Without an experiment, the sizes are those of GPT-2 small."""
    bucket_mb = experiment.config.bucket_mb if experiment else TrainConfig.model_fields["bucket_mb"].default
    bucket = 2**20 * (bucket_mb or 25)
    vocab_size, width = (experiment.model.vocab_size, experiment.model.emb_dim) if experiment else (50257, 768)
    # At 1 MiB, latency counts. A gradient larger than a bucket has a bucket of its own.
    return sorted({2**20, bucket, max(bucket, 4 * vocab_size * width)})


def three_digits(value: float) -> str:
    """Return a number as text with at most three significant digits, or from 100 on as an integer: 0.5, 12.3, 1,234."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def table(rates: Sequence[DeviceRates]) -> Iterator[str]:
    """Yield the lines of a table of the ranks' devices and rates."""
    headings, rows = ["rank", "device", "GiB free", f"{rates[0].precision} TFLOP/s", "copies GB/s"], []
    if has_host := all(each.from_host is not None for each in rates):
        headings.append("from host GB/s")
    for rank, each in enumerate(rates):
        peak = peak_flops(each.name)
        share = "" if peak is None else f" ({each.products / peak:.0%} of peak)"
        rows.append(
            [
                str(rank),
                each.name.removeprefix("NVIDIA ")[:NAME_CHARACTERS],
                f"{each.free_bytes / GIB:.1f} of {each.total_bytes / GIB:.1f}",
                f"{three_digits(each.products / 1e12)}{share}",
                three_digits(each.copies / 1e9),
                *([three_digits((each.from_host or 0) / 1e9)] if has_host else []),
            ]
        )
    yield from aligned(headings, rows, left=("device",))
