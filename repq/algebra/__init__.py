"Merge rules, statistics, and blocks as expressions: needs torch alone"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    kernel=['Kernel'],
    statistics=['Calibrated', 'Estimated', 'Exact', 'STATISTICS', 'Sampled'],
    branch=['Conv', 'Fixed', 'Identity', 'Norm', 'Scale', 'Seq', 'Sum', 'WeightNorm'])
