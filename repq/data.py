"All data sets in one place: the names of `repq.train.data`"
# plain Python: it only gives a module a second name
import sys
from .train import data

sys.modules[__name__] = data
