"`repq.blocks` is `repq.models.blocks`"
# plain Python: it only gives a module a second name
import sys
from .models import blocks

sys.modules[__name__] = blocks
