"""Tiles brought to the host while the next ones are computed."""

from collections.abc import Callable, Iterator

import torch

from poprisk.operators._kernels.tiles import Tile


def on_host(tiles: Iterator[Tile], keep: Callable[[Tile], bool] = lambda tile: True) -> Iterator[Tile]:
    """The tiles in the host's memory: each is copied while the next one is computed.

    On a GPU the copy runs on a stream of its own into pinned memory, and a tile is handed out when it has arrived.

    Args:
        tiles: As they are computed.
        keep: Which tiles are wanted.

    >>> from poprisk._core.autodiff import FlatModel
    >>> from poprisk.operators import kernel_tiles
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> [tile.block.device.type for tile in on_host(kernel_tiles(model, model.weights, torch.ones(5, 2)))]
    ['cpu']
    """
    stream, waiting = None, None
    for tile in tiles:
        if not keep(tile):
            continue
        if not tile.block.is_cuda:
            yield tile
            continue
        stream = stream or torch.cuda.Stream(tile.block.device)
        stream.wait_stream(torch.cuda.current_stream(tile.block.device))
        with torch.cuda.stream(stream):
            block = torch.empty(tile.block.shape, dtype=tile.block.dtype, pin_memory=True)
            block.copy_(tile.block, non_blocking=True)
            tile.block.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0]
        waiting = (Tile(tile.rows, tile.columns, block, tile.bound), arrived)
    if waiting is not None:
        waiting[1].synchronize()
        yield waiting[0]
