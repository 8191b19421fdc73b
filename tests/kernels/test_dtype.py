"""`dtype: auto`: what is chosen from which times, what is kept, what the user reads; one real probe."""

import json
import os
import time

import pytest
import torch

from drafttrain.kernels import dtype, probe, timings
from drafttrain.kernels.build import variant
from drafttrain.kernels.dtype import Choice, Timings, choose, resolve_dtype, slow_warning, timed
from drafttrain.utils.errors import UserError

TIMED = dtype.timed  # conftest replaces it for all other tests
CPU = torch.device("cpu")
ROWS = (1, 16, 128)


def times(**candidates: tuple[float, ...]) -> dict[str, dict[int, float]]:
    """`fp32=(1 row, 16 rows, 128 rows)` in ms, and so on."""
    names = {"fp32": "float32", "bf16": "bfloat16"}
    names |= {f"native_{key}": f"native {name}" for key, name in names.items()}
    return {names[key]: dict(zip(ROWS, value)) for key, value in candidates.items()}


FAST_BF16 = times(fp32=(3, 4, 12), bf16=(1, 2, 6))
SLOW_BF16 = times(fp32=(0.37, 0.43, 1.5), bf16=(0.14, 1.8))  # the probe did not wait for 128 rows
NATIVE_WINS = times(fp32=(0.1, 0.1, 1.5), bf16=(1, 1, 9), native_fp32=(0.37, 0.5), native_bf16=(0.12, 0.29))
NATIVE_LOSES = times(fp32=(9, 9, 1.5), bf16=(1, 1, 0.9), native_fp32=(0.3, 0.3), native_bf16=(0.29, 0.4))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A first start on a machine whose probe gives these results, one after the other."""
    # Compiled here at the latest, in the user's cache: the description of the machine names the kernels, and
    # an empty cache would have them compiled again, with a line that the tests do not expect.
    variant()
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dtype, "timed", TIMED)
    for module in (timings, probe):
        monkeypatch.setattr(module, "variant", lambda: None)
    probed = []

    def start(*results: Timings) -> list[tuple[int, ...]]:
        """Begins a process; returns the arguments of each probe in it."""
        left = list(results)
        probed.clear()

        def measure(hidden: int, intermediate: int, threads: int) -> Timings:
            probed.append((hidden, intermediate, threads))
            return left.pop(0)

        monkeypatch.setattr(probe, "measure", measure)
        monkeypatch.setattr(dtype, "_known", {})
        monkeypatch.setattr(dtype, "_reported", set())
        return probed

    return start


@pytest.mark.parametrize(
    ("work", "ms", "expected"),
    [
        ("decoding", FAST_BF16, torch.bfloat16),
        ("products", FAST_BF16, torch.bfloat16),
        ("decoding", SLOW_BF16, torch.float32),
        ("products", SLOW_BF16, torch.float32),
        ("decoding", NATIVE_WINS, torch.bfloat16),
        ("products", NATIVE_WINS, torch.float32),  # the native kernels are for a few rows
        ("decoding", NATIVE_LOSES, torch.float32),
        ("products", NATIVE_LOSES, torch.bfloat16),
        ("decoding", times(fp32=(1, 1, 1), bf16=(1, 1, 1)), torch.bfloat16),  # no slower, half the memory
        ("decoding", times(fp32=(1, 1, 1), bf16=(0.1, 1.6, 1)), torch.float32),  # much slower at one of them
        ("decoding", times(fp32=(1, 1, 1), bf16=(1.6, 0.1, 1)), torch.float32),
        ("decoding", times(fp32=(1, 1, 1), bf16=(0.7, 1.4, 1)), torch.bfloat16),  # slower at one of them
        ("decoding", times(fp32=(1, 1, 1), bf16=(0.8, 1.3, 1)), torch.float32),
        ("products", times(fp32=(1, 1, 1), bf16=(9, 9, 0.9)), torch.bfloat16),
        ("products", times(fp32=(1, 1, 1), bf16=(0.1, 0.1, 1.05)), torch.float32),
        ("products", times(fp32=(1, 1, 1), bf16=(9,)), torch.float32),
    ],
)
def test_choice(work, ms, expected):
    found = choose(work, ms)
    assert found.dtype == expected
    assert found.reason.startswith(f"dtype: {dtype.dtype_name(expected)}") and "\n" not in found.reason


def test_reasons():
    assert choose("decoding", FAST_BF16).reason == (
        "dtype: bfloat16 for decoding (1 row 1 ms, float32 3 ms; 16 rows 2 ms, float32 4 ms)"
    )
    assert choose("decoding", NATIVE_WINS).reason == (
        "dtype: bfloat16 for decoding (1 row 0.12 ms, float32 0.37 ms; 16 rows 0.29 ms, float32 0.5 ms)"
    )
    assert choose("products", SLOW_BF16).reason == (  # by the most rows that both have
        "dtype: float32 for large batches (16 rows 0.43 ms, bfloat16 1.8 ms)"
    )


@pytest.mark.parametrize(
    ("name", "work", "ms", "warns"),
    [
        ("float32", "products", times(fp32=(1, 1, 2), bf16=(1, 1, 1)), False),
        ("float32", "products", times(fp32=(1, 1, 2.1), bf16=(1, 1, 1)), True),
        ("bfloat16", "products", times(fp32=(1, 1, 2.1), bf16=(1, 1, 1)), False),
        ("bfloat16", "products", SLOW_BF16, True),
        ("bfloat16", "decoding", times(fp32=(1, 1, 1), bf16=(0.5, 5, 9)), True),
        ("bfloat16", "decoding", NATIVE_WINS, False),  # decoding uses the native kernels
        ("float32", "decoding", NATIVE_WINS, True),
        ("bfloat16", "products", NATIVE_WINS, True),
        ("float32", "decoding", times(fp32=(1, 1, 1), bf16=(0.9, 0.9, 1)), False),
    ],
)
def test_a_slow_dtype_gets_a_warning(name, work, ms, warns):
    warning = slow_warning(name, work, ms)
    assert (warning is not None) == warns
    if warns:
        assert warning.startswith(f"dtype: {name} is ") and "times as slow as" in warning
        assert "\n" not in warning


def test_auto_prints_one_line_for_each_work(machine, capsys):
    machine(Timings(NATIVE_WINS))
    for _ in range(3):
        assert resolve_dtype("auto", "decoding", CPU, 576, 1536) == torch.bfloat16
        assert resolve_dtype("auto", "products", CPU, 576, 1536) == torch.float32
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "dtype: bfloat16 for decoding",
        "dtype: float32 for large batches",
    ]


def test_only_the_first_of_several_processes_prints(machine, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    probes = machine(Timings(SLOW_BF16))
    assert resolve_dtype("bfloat16", "products", CPU, 576, 1536) == torch.bfloat16 and not probes
    assert resolve_dtype("auto", "products", CPU, 576, 1536) == torch.float32
    assert capsys.readouterr().err == ""


def test_an_explicit_dtype_is_used(machine, capsys):
    machine(Timings(SLOW_BF16))
    assert resolve_dtype("float32", "products", CPU, 576, 1536) == torch.float32
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert resolve_dtype("bfloat16", "products", CPU, 576, 1536) == torch.bfloat16
    assert capsys.readouterr().err == (
        "dtype: bfloat16 is 4.2 times as slow as float32 for large batches here "
        "(16 rows 1.8 ms, float32 0.43 ms); leave it out for auto\n"
    )


@pytest.mark.parametrize("name", ["int4", "float64", "torch.bfloat16", "", "BFLOAT16"])
def test_unknown_names_are_refused(machine, name):
    machine()
    with pytest.raises(UserError) as error:
        resolve_dtype(name, "products", CPU, 64, 128)
    assert str(error.value).startswith("dtype: must be one of auto, bfloat16, float32, float16, got ")


def test_float16_is_for_gpus(machine):
    machine()
    with pytest.raises(UserError, match="^dtype: must be bfloat16 or float32 on a CPU, got float16, which"):
        resolve_dtype("float16", "decoding", CPU, 64, 128)
    assert resolve_dtype("float16", "decoding", torch.device("cuda"), 64, 128) == torch.float16


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_is_asked_and_not_measured(machine, monkeypatch, capsys, has_bf16):
    probes = machine()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    expected = torch.bfloat16 if has_bf16 else torch.float32
    cuda = torch.device("cuda", 0)
    assert resolve_dtype("auto", "products", cuda, 64, 128) == expected
    assert resolve_dtype("float32", "products", cuda, 64, 128) == torch.float32
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dtype: {dtype.dtype_name(expected)} for large batches (the GPU ")
    assert not probes


def fastest_dtype(work: str, *sizes: int, **threads: int) -> Choice:
    return choose(work, timed(*sizes, **threads).ms)


def test_results_are_kept(machine, tmp_path, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # the suite may run with it
    probes = machine(Timings(FAST_BF16))
    assert fastest_dtype("decoding", 576, 1536, threads=2).dtype == torch.bfloat16
    assert fastest_dtype("products", 576, 1536, threads=2).dtype == torch.bfloat16
    assert probes == [(576, 1536, 2)]  # one probe for both
    kept = json.loads((tmp_path / "cache" / "dtype.json").read_text())
    (key,) = kept
    for part in (torch.__version__, torch.backends.cpu.get_cpu_capability(), "2 threads", "576x1536"):
        assert part in key

    assert machine() == [] and timed(576, 1536, threads=2).ms == FAST_BF16

    def on_another_machine(sizes=(576, 1536, 2)) -> None:
        probes = machine(Timings(SLOW_BF16))
        assert fastest_dtype("products", *sizes).dtype == torch.float32 and len(probes) == 1

    for sizes in ((576, 1536, 1), (576, 2048, 2), (64, 1536, 2)):
        on_another_machine(sizes)
    for change in (
        lambda: monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        lambda: monkeypatch.setattr(timings, "variant", lambda: "another"),
        lambda: monkeypatch.setattr(torch, "__version__", "9"),
        lambda: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        lambda: monkeypatch.setattr(timings, "describe_machine", lambda device: {"processor": "other"}),
    ):
        change()
        on_another_machine()
    assert len(json.loads((tmp_path / "cache" / "dtype.json").read_text())) == 9


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{", '{"KEY": 1}', '{"KEY": {"float32": {"1": 1}}}', '{"KEY": {"float32": {"1": "x"}}}']
    + ['{"KEY": {"float32": {"1": 1, "16": 1, "128": 0}, "bfloat16": {"1": 1}}}']
    + ['{"KEY": {"float32": {"1": 1, "16": 1, "128": 1}, "bfloat16": {}}}', '{"KEY": {"float32": [1, 2]}}'],
)
def test_a_damaged_cache_is_measured_again(machine, tmp_path, damage):
    machine(Timings(FAST_BF16))
    fastest_dtype("products", 64, 128)
    path = tmp_path / "cache" / "dtype.json"
    (key,) = json.loads(path.read_text())
    path.write_text(damage.replace("KEY", key.replace('"', '\\"')))
    probes = machine(Timings(SLOW_BF16))
    assert fastest_dtype("products", 64, 128).dtype == torch.float32 and len(probes) == 1
    assert key in json.loads(path.read_text())
    assert machine() == [] and fastest_dtype("products", 64, 128).dtype == torch.float32


def test_an_unwritable_cache(machine, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file where a folder should be")
    for _ in range(2):  # processes
        probes = machine(Timings(FAST_BF16), Timings(SLOW_BF16))
        assert fastest_dtype("products", 64, 128).dtype == torch.bfloat16
        assert fastest_dtype("products", 64, 256).dtype == torch.float32 and len(probes) == 2
        assert fastest_dtype("decoding", 64, 128).dtype == torch.bfloat16  # one process keeps to its choice
        (line,) = capsys.readouterr().err.splitlines()
        assert "dtype.json cannot be written" in line and "DRAFTTRAIN_CACHE" in line


def test_a_disturbed_probe_is_repeated(machine, tmp_path, capsys):
    probes = machine(Timings(SLOW_BF16, "other processes"), Timings(FAST_BF16))
    assert fastest_dtype("products", 64, 128).dtype == torch.bfloat16 and len(probes) == 2
    assert capsys.readouterr().err == "" and (tmp_path / "cache" / "dtype.json").exists()


def test_a_probe_disturbed_twice_is_used_and_not_kept(machine, tmp_path, capsys, monkeypatch):
    for _ in range(2):  # processes
        probes = machine(*[Timings(FAST_BF16, "its repeats")] * 2, Timings(SLOW_BF16))
        assert fastest_dtype("products", 64, 128, threads=2).dtype == torch.float32
        assert probes == [(64, 128, 2), (64, 128, 2), (64, 128, 1)]
        lines = capsys.readouterr().err.splitlines()
        assert lines == [
            "dtype: the probe was disturbed (its repeats); it was repeated on one thread and not kept"
        ]
        machine(*[Timings(FAST_BF16, "its repeats")] * 2, Timings(SLOW_BF16))
        monkeypatch.setattr(dtype, "_reported", {*dtype._reported, *lines})
        resolve_dtype("bfloat16", "products", CPU, 64, 128)
        assert capsys.readouterr().err == ""  # doubtful times are no reason for a warning
    assert not (tmp_path / "cache").exists()


class Delayed:
    """A layer that takes that many seconds."""

    def __init__(self, *seconds: float):
        self.seconds = [*seconds] * 50

    def __call__(self, x: torch.Tensor) -> None:
        time.sleep(self.seconds.pop(0))


class Load:
    """Other processes, as `OtherLoad` sees them."""

    def __init__(self, cores: float | None = 0.0):
        self.cores = cores

    def lap(self) -> float | None:
        return self.cores


def stub_products(monkeypatch, fp32: Delayed, bf16: Delayed, load: Load | None = None) -> None:
    monkeypatch.setattr(probe, "OtherLoad", lambda: load or Load())
    layers = {"float32": [fp32], "bfloat16": [bf16]}
    monkeypatch.setattr(probe, "_products", lambda hidden, width: {k: list(v) for k, v in layers.items()})


def test_a_hopeless_candidate_is_not_waited_for(monkeypatch):
    slow = Delayed(0.1)
    stub_products(monkeypatch, Delayed(0.002), slow)
    found = probe.measure(64, 128, torch.get_num_threads())
    assert found.ms["float32"].keys() == set(ROWS) and found.ms["bfloat16"].keys() == {1}
    assert len(slow.seconds) == 50 - 4  # a first call and three that are timed


def test_repeats_that_differ_disturb(monkeypatch):
    stub_products(monkeypatch, Delayed(0.001), Delayed(0.001, 0.001, 0.02))
    assert probe.measure(64, 128, torch.get_num_threads()).disturbed == "its repeats differ too much"


def test_other_processes_disturb(monkeypatch):
    monkeypatch.setattr(probe, "LEAST_SPREAD", 60.0)  # of sleeps, on any machine
    for load, problem in ((Load(1.3), "other processes took 1.3 of its 1 cores"), (Load(None), None)):
        stub_products(monkeypatch, Delayed(0.002), Delayed(0.002), load)
        assert probe.measure(64, 128, threads=1).disturbed == problem


def test_native_kernels_are_timed_for_a_few_rows(monkeypatch):
    stub_products(monkeypatch, Delayed(0.001), Delayed(0.002))
    products = probe._products
    native = {"native float32": [Delayed(0.002)], "native bfloat16": [Delayed(0.0005)]}
    monkeypatch.setattr(probe, "_products", lambda *sizes: products(*sizes) | native)
    found = probe.measure(64, 128, torch.get_num_threads())
    assert all(found.ms[name].keys() == {1, 16} for name in native)
    assert choose("decoding", found.ms).dtype == torch.bfloat16
    assert choose("products", found.ms).dtype == torch.float32


@pytest.mark.parametrize("sizes", [(64, 128), (96, 40)])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_real_probe(machine, monkeypatch, tmp_path, sizes, kernels):
    measure = probe.measure
    machine()
    monkeypatch.setattr(probe, "measure", measure)
    if kernels:
        for module in (timings, probe):
            monkeypatch.setattr(module, "variant", variant)
    before, seed = torch.get_num_threads(), torch.get_rng_state()
    found = timed(*sizes, threads=1)
    chosen = choose("decoding", found.ms)
    assert chosen.dtype in (torch.float32, torch.bfloat16) and chosen.reason.startswith("dtype: ")
    assert {"float32", "bfloat16"} <= found.ms.keys()
    assert ("native bfloat16" in found.ms) == (kernels and variant() is not None)
    assert all(t > 0 for of in found.ms.values() for t in of.values())
    assert set(ROWS) == found.ms["float32"].keys()
    assert torch.get_num_threads() == before and torch.equal(torch.get_rng_state(), seed)
    assert set(os.listdir(tmp_path)) <= {"cache"}
