"""Jobs need zarr and Dask, which the extra ``jobs`` installs, and with it ``dev``."""

from importlib.util import find_spec

if find_spec("zarr") is None or find_spec("distributed") is None:
    collect_ignore_glob = ["test_*.py"]
