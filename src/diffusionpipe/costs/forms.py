"""The forms in which a frozen matrix may be stored in one byte or four bits a number, and their bytes.

    float8   e4m3 numbers, one scale for each 128 inputs of a row        1 + 4 / 128 bytes a number
    int8     integers of -127 to 127, scales as above                     1 + 4 / 128
    nf4      two numbers in a byte, one scale for each 64 numbers,        1 / 2 + 1 / 64 + 4 / (64 * 256)
             which is one byte itself; one scale of scales for 256

`models/parameters/forms.py` encodes and widens.
"""

from enum import StrEnum
from math import prod

from diffusionpipe.errors import ConfigError
from diffusionpipe.units import Bytes

INPUTS_OF_A_SCALE = 128
"""Inputs of a row that have one scale, in float8 and int8."""
BLOCK, GROUP = 64, 256
"""nf4: numbers of a block, which have one scale; blocks of a group, which have one scale of scales."""


class Form(StrEnum):
    """The forms in which a frozen matrix may be stored: one byte for each number, or four bits."""

    FLOAT8 = "float8"
    INT8 = "int8"
    NF4 = "nf4"


def has_rows(form: Form) -> bool:
    """Whether the form has a byte for each number and scales along each row, as float8 and int8 have; nf4 has neither.

    Raises:
        ConfigError: there is no such form.
    """
    match form:
        case Form.FLOAT8 | Form.INT8:
            return True
        case Form.NF4:
            return False
    raise ConfigError(f"{str(form)!r} is not a form of stored weights; use {', '.join(Form)}")


def shapes(form: Form, rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the codes, shape of the scales) of a stored matrix; codes are uint8, scales float32.

    Raises:
        ConfigError: there is no such form.

    >>> shapes(Form.INT8, 256, 512), shapes(Form.NF4, 256, 512)
    (((256, 512), (256, 4)), ((67584,), (8,)))
    """
    if has_rows(form):
        return (rows, columns), (rows, -(-columns // INPUTS_OF_A_SCALE))
    numbers = rows * columns
    blocks = -(-numbers // BLOCK)
    # Two numbers in a byte, and a byte for each block's scale.
    return (-(-numbers // 2) + blocks,), (-(-blocks // GROUP),)


def numbers_in(form: Form, codes: int) -> int:
    """The number of weights in a stored matrix, from the bytes of its codes; for nf4 it may be up to 63 too large.

    >>> [numbers_in(form, shapes(form, 256, 512)[0][0] * (1 if form is Form.NF4 else 512)) for form in Form]
    [131072, 131072, 131072]
    """
    return codes if has_rows(form) else codes * BLOCK // (BLOCK // 2 + 1)  # 33 bytes hold a block of 64 numbers


def stored_bytes(form: Form, rows: int, columns: int) -> Bytes:
    """The bytes of a stored matrix of this shape, codes and scales together.

    >>> stored_bytes(Form.INT8, 256, 512) / (256 * 512), stored_bytes(Form.NF4, 4096, 4096) / 4096**2
    (1.03125, 0.515869140625)
    """
    codes, scales = shapes(form, rows, columns)
    return prod(codes) + 4 * prod(scales)
