"`python -m repq.cli` is `repq`"
# plain Python: it only calls the command
import sys
from repq.cli.command import main

if __name__ == '__main__': sys.exit(main())
