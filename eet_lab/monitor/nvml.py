"""NVIDIA's management library: what the driver says about a GPU. The only file that imports `pynvml`.

Rates follow what the sensors can tell: memory, clock and energy move at once, power and utilization are
windowed means, temperature is slow. Reading faster costs time and shows nothing new.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from eet_lab.errors import MonitorError
from eet_lab.monitor.sources import Meter, Source

# Bits of nvmlDeviceGetCurrentClocksEventReasons that void a timing. The others (idle, clocks set by a user,
# display) do not take speed away from a running kernel.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "external power brake",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, the newest CUDA it can run, and its GPUs."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def find_driver() -> Driver:
    """What driver and GPUs this machine has. MonitorError, with NVML's own reason, when it cannot say."""
    nvml = _start()
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(
            Gpu(_text(nvml.nvmlDeviceGetName(handle)), tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
            for handle in handles
        )
        return Driver(_text(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), gpus)
    except nvml.NVMLError as error:
        raise MonitorError(f"NVML stopped answering: {error}") from error
    finally:
        _stop(nvml)


class NvmlSource(Source):
    """One GPU by its UUID, never by its index: CUDA_VISIBLE_DEVICES renumbers devices, NVML does not.

    `device_uuid` may lack the "GPU-" or "MIG-" in front, as torch gives it. MonitorError when NVML lacks it.
    """

    def __init__(self, device_uuid: str) -> None:
        self._nvml = _start()
        try:
            self._handle = _find(self._nvml, device_uuid)
            model = _text(self._nvml.nvmlDeviceGetName(self._handle))
            self.uuid = _text(self._nvml.nvmlDeviceGetUUID(self._handle))
        except self._nvml.NVMLError as error:
            _stop(self._nvml)
            raise MonitorError(f"NVML knows no device {device_uuid}: {error}") from error
        self._open = True
        super().__init__("nvml", f"{model} (NVML)", self._meters_of_device(), (self._nvml.NVMLError,))

    def condition(self) -> list[str]:
        """Other processes on the GPU, clocks held down, MIG: each voids a timing.

        Processes are counted and never matched by id: in a container the ids are the host's.
        """
        reasons = []
        with contextlib.suppress(self._nvml.NVMLError):
            num_processes = len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
            if num_processes > 1:
                reasons.append(f"the GPU is shared: {num_processes} processes use it")
        with contextlib.suppress(self._nvml.NVMLError):
            bits = int(self._throttle_bits()[0])
            held = [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]
            if held:
                reasons.append(f"the clocks are held down: {', '.join(held)}")
        if self.uuid.startswith("MIG"):
            reasons.append("this is a MIG slice: its neighbours share bandwidth and power")
        return reasons

    def close(self) -> None:
        """Let go of NVML; may be called twice."""
        super().close()
        if self._open:
            self._open = False
            _stop(self._nvml)

    def _meters_of_device(self) -> list[Meter]:
        nvml, handle, sensor = self._nvml, self._handle, self._nvml.NVML_TEMPERATURE_GPU
        return [
            self._memory_meter(),
            Meter({"energy_j": "J"}, lambda: (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,)),
            Meter({"sm_clock_mhz": "MHz"}, lambda: (nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),)),
            self._power_meter(),
            Meter({"utilization_percent": "%", "memory_busy_percent": "%"}, self._utilization, 0.2),
            Meter({"throttle_bits": "bits"}, self._throttle_bits, 0.5),
            Meter({"temperature_c": "°C"}, lambda: (nvml.nvmlDeviceGetTemperature(handle, sensor),), 1.0),
        ]

    def _memory_meter(self) -> Meter:
        """Version 2 tells apart what the driver keeps for itself; older drivers only have version 1."""
        nvml, handle = self._nvml, self._handle

        def version_2() -> tuple[float, ...]:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return memory.used, memory.total, memory.reserved

        def version_1() -> tuple[float, ...]:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return memory.used, memory.total

        units = {"memory_used_bytes": "B", "memory_total_bytes": "B"}
        if self._answers(version_2):
            return Meter(units | {"memory_reserved_bytes": "B"}, version_2)
        return Meter(units, version_1)

    def _power_meter(self) -> Meter:
        """The instant field where there is one: nvmlDeviceGetPowerUsage is mostly a mean over a second."""
        nvml, handle = self._nvml, self._handle

        def instant() -> tuple[float, ...]:
            [answer] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(answer.nvmlReturn)
            return (answer.value.uiVal / 1e3,)

        def mean() -> tuple[float, ...]:
            return (nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,)

        return Meter({"power_w": "W"}, instant if self._answers(instant) else mean, 0.2)

    def _utilization(self) -> tuple[float, ...]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return rates.gpu, rates.memory

    def _throttle_bits(self) -> tuple[float, ...]:
        return (self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle),)

    def _answers(self, call: Any) -> bool:
        try:
            call()
        except self._nvml.NVMLError:
            return False
        return True

    def _reason(self, error: Exception) -> str:
        return f"not available under MIG ({error})" if self.uuid.startswith("MIG") else f"NVML: {error}"


def _start() -> Any:
    """Import and initialise NVML, which counts its users. Every way it fails means the same: no NVML here."""
    try:
        import pynvml
    except ImportError as error:
        raise MonitorError("NVML bindings are missing: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MonitorError(f"NVML is not usable: {error}") from error
    return pynvml


def _stop(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):  # the driver may have gone before us
        nvml.nvmlShutdown()


def _find(nvml: Any, uuid: str) -> Any:
    """The handle of a UUID; torch gives the bare form for whole GPUs and for MIG slices alike."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names[:-1]:
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByUUID(names[-1])


def _text(value: str | bytes) -> str:
    """Older bindings answer bytes."""
    return value.decode() if isinstance(value, bytes) else value
