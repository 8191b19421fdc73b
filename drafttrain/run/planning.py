"""Hours and memory that a run would take on a machine of stated speed: arithmetic, nothing is measured.

    forwards over many tokens      FLOPs / (devices · peak · utilisation)
    decoding, per token            max(2 P / (peak · utilisation),
                                   (W / B + C) / (bandwidth · decode_utilisation))

P: parameters that multiply (input embeddings are looked up). W: bytes of the weights, read once for the B
sequences of a step. C: bytes of a sequence's keys and values. Left out are attention scores, what processes
tell each other, evaluations while training, and all time between the forwards.
"""

from dataclasses import dataclass

from drafttrain.utils.ranges import check_ranges, setting


@dataclass
class PlanConfig:
    """What `--dry-run` assumes of the machine (section `plan` of a recipe). It changes nothing that runs.

    Attributes:
        target_config: folder with a config.json of the target's shape, while the target itself is not there.
        corpus_tokens: tokens of the corpus that will be, while it is not built. null: what the sources hold.
        devices: GPUs, or CPUs, of the same kind.
        device_memory_gb: memory of each (10^9 bytes). null: not compared.
        device_tflops: peak dense 10^12 operations per second of each in the target's dtype, from its data
            sheet. null: no hours are told.
        device_gb_per_s: memory bandwidth of each, 10^9 bytes per second, from its data sheet.
        utilisation: share of the peak that forwards over many tokens reach: an assumption.
        decode_utilisation: share of the bandwidth that decoding reaches: an assumption.
    """

    target_config: str | None = None
    corpus_tokens: int | None = setting(None, gt=0)
    devices: int = setting(1, gt=0)
    device_memory_gb: float | None = setting(None, gt=0)
    device_tflops: float | None = setting(None, gt=0)
    device_gb_per_s: float | None = setting(None, gt=0)
    utilisation: float = setting(0.35, gt=0, le=1)
    decode_utilisation: float = setting(0.5, gt=0, le=1)

    def check(self) -> None:
        """Raises:
        UserError: a value out of range.
        """
        check_ranges(self, "plan")


def forward_hours(plan: PlanConfig, flops: float, devices: int | None = None) -> str | None:
    """Hours of so many operations; None where no speed is stated.

    Args:
        devices: how many take part. None: all.
    """
    if plan.device_tflops is None:
        return None
    devices = devices or plan.devices
    seconds = flops / (devices * plan.device_tflops * 1e12 * plan.utilisation)
    return (
        f"{_hours(seconds)} at {plan.utilisation:.0%} of {devices} x {plan.device_tflops:g} TFLOP/s, assumed"
    )


@dataclass
class Decoding:
    """What decoding one token costs.

    Attributes:
        parameters: of the target, that a token is multiplied with.
        weight_bytes: of the target.
        cache_bytes: keys and values of one sequence.
        batch: sequences that one reading of the weights serves.
    """

    parameters: int
    weight_bytes: int
    cache_bytes: float
    batch: int = 1

    def seconds(self, plan: PlanConfig) -> float:
        """Of one device, for a token."""
        arithmetic = 2 * self.parameters / (plan.device_tflops * 1e12 * plan.utilisation)
        read = self.weight_bytes / self.batch + self.cache_bytes
        return max(arithmetic, read / (plan.device_gb_per_s * 1e9 * plan.decode_utilisation))


def decode_hours(plan: PlanConfig, tokens: float, cost: Decoding, devices: int = 1) -> str | None:
    """Hours to decode so many tokens; None where no speed is stated."""
    if plan.device_tflops is None or plan.device_gb_per_s is None:
        return None
    return (
        f"{_hours(tokens * cost.seconds(plan) / devices)} at {plan.decode_utilisation:.0%} of {devices} x "
        f"{plan.device_gb_per_s:g} GB/s, assumed"
    )


def fits(plan: PlanConfig, n_bytes: float) -> str:
    """What to say behind a stage's memory: that of a device, and whether it is enough. A target is not split
    over devices: each process holds all of it."""
    if plan.device_memory_gb is None:
        return ""
    if n_bytes <= plan.device_memory_gb * 1e9:
        return f" of {plan.device_memory_gb:g} GB"
    return f", MORE than the {plan.device_memory_gb:g} GB of a device"


def _hours(seconds: float) -> str:
    return f"about {seconds / 3600:.1f} h" if seconds >= 360 else f"about {max(seconds / 60, 0.1):.1f} min"
