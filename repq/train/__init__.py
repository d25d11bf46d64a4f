"Images, super-resolution, fastai callbacks"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    images=[],
    super_resolution=[],
    learner=['QAT'],
    doctor=['QATDoctor'])
