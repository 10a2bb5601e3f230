"""Model families: one transformer of ours, checkpoint loading, and wrappers around other networks."""

import logging

# Where torchao is installed, transformers imports it, and it logs which extensions it could not load and does not need.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())
