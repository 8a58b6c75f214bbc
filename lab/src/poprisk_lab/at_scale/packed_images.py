"""Small colour images, compressed without loss: what is left of each pixel after a prediction from its neighbours."""

import lzma

import numpy as np
from jaxtyping import UInt8

Images = UInt8[np.ndarray, "n side side 3"]
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 2, "lc": 0, "lp": 0, "pb": 0}]


def pack_images(images: Images) -> bytes:
    """Compress images; :func:`unpack_images` gives the same bytes back.

    >>> some = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    >>> bool((unpack_images(pack_images(some), 4) == some).all())
    True
    """
    red, green, blue = np.moveaxis(images.astype(np.int16), -1, 0)
    left = []
    for plane in (green, red - green, blue - green):
        west, north, corner = (np.zeros_like(plane) for _ in range(3))
        west[:, :, 1:], north[:, 1:], corner[:, 1:, 1:] = plane[:, :, :-1], plane[:, :-1], plane[:, :-1, :-1]
        west[:, 1:, 0] = corner[:, 1:, 0] = plane[:, :-1, 0]
        north[:, 0, 1:] = corner[:, 0, 1:] = plane[:, 0, :-1]
        left.append((plane - _predicted(west, north, corner)).astype(np.uint8))
    return lzma.compress(np.stack(left).tobytes(), lzma.FORMAT_XZ, filters=_FILTERS)


def unpack_images(data: bytes, side: int) -> Images:
    """The images of :func:`pack_images`."""
    left = np.frombuffer(lzma.decompress(data), np.uint8).reshape(3, -1, side, side)
    planes = np.zeros(left.shape, np.int16)
    found = np.zeros((left.shape[1], side, side, 3), np.uint8)
    for which, colour in enumerate((1, 0, 2)):
        plane = planes[which]
        for y in range(side):
            for x in range(side):
                west = plane[:, y, x - 1] if x else plane[:, y - 1, x] if y else plane[:, 0, 0]
                north = plane[:, y - 1, x] if y else west
                corner = plane[:, y - 1, x - 1] if x and y else north if y else west
                value = left[which, :, y, x] + _predicted(west, north, corner)
                pixel = (value + planes[0][:, y, x] if which else value) & 255
                found[:, y, x, colour] = pixel
                plane[:, y, x] = pixel - planes[0][:, y, x] if which else pixel
    return found


def _predicted(west: np.ndarray, north: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """The median of both neighbours and their plane."""
    return np.clip(west + north - corner, np.minimum(west, north), np.maximum(west, north))
