"Fair timing"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    moved=['repq.bench.cases', 'repq.bench.timing', 'repq.tools.machine'],
    timing=[],
    cases=['bench_deploy', 'bench_growth', 'bench_memory', 'bench_quantizer', 'bench_step'])
