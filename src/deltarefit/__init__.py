"""Ship only the bits that changed from an RL trainer to live rollout servers, bit-exact and recoverable.

``Publisher`` is the trainer's side, ``Receiver`` the rollout side; both are handed a store and an adapter::

    from deltarefit import Publisher, open_store
    from deltarefit.sources.checkpoint import CheckpointSource

    publisher = Publisher(open_store("s3://bucket/run7"), CheckpointSource("ckpt/step-42"))
    version = publisher.publish(step=42).version
"""

from deltarefit.baseline import MemoryBaseline
from deltarefit.errors import RefitError
from deltarefit.events import Event
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.ports import Source, Store, Target
from deltarefit.publisher import Published, Publisher
from deltarefit.receiver import Receiver
from deltarefit.runlog import RunLog
from deltarefit.stores import open_store

__version__ = "0.1.0"

__all__ = [
    "Catalog",
    "Event",
    "MemoryBaseline",
    "Published",
    "Publisher",
    "Receiver",
    "RefitError",
    "RunLog",
    "Source",
    "Store",
    "Target",
    "TensorEntry",
    "open_store",
]
