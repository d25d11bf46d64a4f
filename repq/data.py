"All data in one place: the names of `repq.train.images` and of `repq.train.super_resolution`"
# plain Python: it only names things
from .train import images as _images, super_resolution as _super_resolution
from .train.images import * # noqa: F403
from .train.super_resolution import * # noqa: F403

__all__ = [*_images.__all__, *_super_resolution.__all__]


def __getattr__(name): return getattr(_images, name)   # classes that are made when first asked for
