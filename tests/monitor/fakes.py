"""Stand-ins for NVML and for a source, and waiting for a thread."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace

UUID = "11111111-2222-3333-4444-555555555555"


class FakeNvml(ModuleType):
    """The calls that the package makes, for two GPUs; `broken` maps a call's name to what it raises."""

    class NVMLError(Exception):
        pass

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = 0, 1, 0, 186
    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.broken: dict[str, str] = {}
        self.calls: list[str] = []
        self.num_users = 0
        self.num_processes = 1
        self.throttle = 0x1
        self.energy_mj = 5_000
        self.power_return = 0
        self.uuids = ["GPU-00000000-0000-0000-0000-000000000000", f"GPU-{UUID}"]

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken or "all" in self.broken:
            raise self.NVMLError(self.broken.get(name) or self.broken["all"])

    def nvmlInit(self):
        self._call("init")
        self.num_users += 1

    def nvmlShutdown(self):
        self._call("shutdown")
        self.num_users -= 1

    def nvmlSystemGetCudaDriverVersion(self):
        return 13020

    def nvmlSystemGetDriverVersion(self):
        return "595.10"

    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise self.NVMLError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA Fake"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        self._call("memory_v2" if version else "memory_v1")
        return SimpleNamespace(used=100 + handle, total=1000, reserved=7)

    def nvmlDeviceGetClockInfo(self, handle, which):
        self._call("clock")
        return 1980

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._call("energy")
        return self.energy_mj

    def nvmlDeviceGetFieldValues(self, handle, fields):
        self._call("power_field")
        return [SimpleNamespace(nvmlReturn=self.power_return, value=SimpleNamespace(uiVal=312_500))]

    def nvmlDeviceGetPowerUsage(self, handle):
        self._call("power_mean")
        return 300_000

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._call("utilization")
        return SimpleNamespace(gpu=97, memory=55)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._call("temperature")
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._call("throttle")
        return self.throttle

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._call("processes")
        return [SimpleNamespace(pid=1)] * self.num_processes


class Counter:
    """A source that counts its own reads."""

    name, label = "counter", "counter"
    metrics = {"n": "1"}

    def __init__(self):
        self.missing, self.n, self.closed = {}, 0, 0

    def read(self):
        self.n += 1
        return {"n": float(self.n)}

    def condition(self):
        return []

    def close(self):
        self.closed += 1


def wait_for(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
