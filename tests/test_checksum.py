"""CRC-32C, alone, per block and combined."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_ckpt.checksum import (
    block_crcs,
    combine_blocks,
    combine_crc32c,
    count_blocks,
    crc32c,
    unpack_crcs,
    verify_blocks,
)
from remote_ckpt.errors import ConfigError

LARGE = bytes(range(256)) * 1024


def bitwise_crc32c(data: bytes) -> int:
    """The definition, bit by bit (RFC 3720, section 12.1)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


class TestWhole:
    def test_the_published_check_values_come_out(self) -> None:
        assert crc32c(b"123456789") == 0xE3069283
        assert crc32c(bytes(32)) == 0x8A9136AA
        assert crc32c(b"\xff" * 32) == 0x62A8AB43

    @given(st.binary(max_size=300))
    def test_it_follows_the_definition(self, data: bytes) -> None:
        assert crc32c(data) == bitwise_crc32c(data)

    @given(st.binary(max_size=300), st.binary(max_size=300))
    def test_it_continues_from_an_earlier_value(self, first: bytes, second: bytes) -> None:
        assert crc32c(second, crc32c(first)) == crc32c(first + second)

    def test_every_kind_of_buffer_gives_the_same_value(self) -> None:
        expected = crc32c(LARGE)
        assert crc32c(bytearray(LARGE)) == expected
        assert crc32c(memoryview(LARGE)) == expected
        assert crc32c(memoryview(array("Q", LARGE))) == expected
        assert crc32c(memoryview(b"x" + LARGE)[1:]) == expected


class TestCombine:
    @given(st.binary(max_size=2000), st.binary(max_size=2000))
    def test_the_crc_of_a_concatenation_follows_from_its_parts(self, first: bytes, second: bytes) -> None:
        combined = combine_crc32c(crc32c(first), crc32c(second), len(second))
        assert combined == crc32c(first + second)

    @given(st.integers(0, 0xFFFFFFFF), st.integers(0, 2**50), st.integers(0, 2**50))
    def test_moving_ahead_twice_is_moving_ahead_by_the_sum(self, crc: int, near: int, far: int) -> None:
        """Reaches sizes that no test could allocate, where a wrong period of the powers would show."""
        twice = combine_crc32c(combine_crc32c(crc, 0, near), 0, far)
        assert twice == combine_crc32c(crc, 0, near + far)

    def test_gibibytes_of_zeros_combine_from_a_doubled_block(self) -> None:
        crc, size_bytes = crc32c(bytes(1024)), 1024
        while size_bytes < 2**34:
            crc, size_bytes = combine_crc32c(crc, crc, size_bytes), size_bytes * 2
        blocks = struct.pack("<I", crc32c(bytes(2**20))) * 2**14
        assert combine_blocks(blocks, 2**20, 2**34) == crc


class TestBlocks:
    @given(st.binary(max_size=1000), st.integers(1, 1200))
    def test_the_whole_follows_from_the_blocks(self, data: bytes, block_bytes: int) -> None:
        crcs = block_crcs(data, block_bytes)
        assert len(crcs) == 4 * count_blocks(len(data), block_bytes)
        assert combine_blocks(crcs, block_bytes, len(data)) == crc32c(data)
        assert verify_blocks(data, crcs, block_bytes) is None

    def test_blocks_are_packed_in_order_and_little_endian(self) -> None:
        crcs = block_crcs(b"12345678912345", 9)
        assert crcs == struct.pack("<II", 0xE3069283, crc32c(b"12345"))
        assert unpack_crcs(crcs) == (0xE3069283, crc32c(b"12345"))

    def test_no_bytes_have_no_blocks(self) -> None:
        assert block_crcs(b"", 4096) == b""
        assert combine_blocks(b"", 4096, 0) == 0
        assert verify_blocks(b"", b"", 4096) is None

    @given(st.data())
    def test_a_flipped_bit_is_found_in_its_block(self, data: st.DataObject) -> None:
        content = bytearray(data.draw(st.binary(min_size=1, max_size=500)))
        block_bytes = data.draw(st.integers(1, 600))
        crcs = block_crcs(content, block_bytes)
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        assert verify_blocks(content, crcs, block_bytes) == bit // 8 // block_bytes

    def test_wider_elements_are_cut_by_bytes(self) -> None:
        numbers = array("d", range(100))
        assert block_crcs(memoryview(numbers), 24) == block_crcs(numbers.tobytes(), 24)

    @pytest.mark.parametrize("crcs", [b"", bytes(4), bytes(12), bytes(7)])
    def test_a_wrong_number_of_checksums_is_refused(self, crcs: bytes) -> None:
        with pytest.raises(ConfigError, match="checksums"):
            verify_blocks(bytes(20), crcs, 10)
        with pytest.raises(ConfigError, match="checksums"):
            combine_blocks(crcs, 10, 20)

    @pytest.mark.parametrize("block_bytes", [0, -1])
    def test_blocks_of_no_size_are_refused(self, block_bytes: int) -> None:
        with pytest.raises(ConfigError, match="at least 1"):
            block_crcs(b"abc", block_bytes)
