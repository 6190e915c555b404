"""What the kernel that copies pages refuses before it is launched."""

from __future__ import annotations

import pytest
import torch

from antiphon.kernels.page_copy import copy_pages


def test_a_slot_of_another_size_is_refused() -> None:
    pages = torch.zeros(4, 2, 3, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2 pages do not fill 100 bytes"):
        copy_pages(pages, [0, 1], torch.zeros(100, dtype=torch.uint8), 0, gather=True)


def test_bytes_that_are_no_whole_words_are_refused() -> None:
    pages = torch.zeros(4, 2, 3, 24, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no multiples of 16"):
        copy_pages(pages[:, :, :1], [0], torch.zeros(48, dtype=torch.uint8), 0, gather=True)
