"""Two records of one program, aligned by the order of their names: which entry of one is which of the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumos_nb._jit import jit

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

ENOUGH = 16
"""Names in a row that must be equal behind a difference, so that it counts as explained."""

MOST_EDITS = 128
"""Entries of one that the other lacks, in one difference; beyond it a longer run of equal names is looked for."""

SIZES = (1024, 256, 64, 16)
"""Lengths of runs that are looked for, at the beginning and behind a difference that is too large."""


SWAPPED = 4
"""Entries that may have changed places: times in whole microseconds leave open which of two began first."""


def align(pattern: Int64s, record: Int64s, known: Int64s) -> tuple[Int64s, Int64s]:
    """Which entry of `pattern` each entry of `record` repeats, and in which repetition of the pattern.

    The record runs through the pattern again and again. Where the two differ, the fewest entries that one has beyond
    the other are taken to explain it (Myers, An O(ND) difference algorithm, 1986), or the nearest long run of equal
    names. With n names this takes O(n log n), since the size of a difference is bounded.

    Parameters
    ----------
    pattern, record : array of int64
        Names by number, in the order in which they began.
    known : array of int64
        Entry of the pattern that an entry of the record is known to be, or -1.

    Returns
    -------
    places, repetitions : array of int64
        -1 where the pattern has no such entry.

    Examples
    --------
    >>> record = np.array([9, 0, 1, 2, 9, 9, 3, 4, 5, 0, 1, 3, 4, 5])
    >>> places, repetitions = align(np.arange(6), record, np.full(14, -1))
    >>> places.tolist()
    [-1, 0, 1, 2, -1, -1, 3, 4, 5, 0, 1, 3, 4, 5]
    >>> repetitions.tolist()
    [-1, 0, 0, 0, -1, -1, 0, 0, 0, 1, 1, 1, 1, 1]
    """
    m, (i, p) = pattern.size, _beginning(*_hashed(pattern, record))
    start = p + m * (i // m + 2)  # what comes before keeps a place of 0 or more
    after = _walk(pattern, record[i:], known[i:], start, *_hashed(pattern, record[i:]))
    back, past = pattern[::-1].copy(), record[:i][::-1].copy()
    turned = np.where(known[:i] >= 0, m - 1 - known[:i], -1)[::-1].copy()
    before = _walk(back, past, turned, 2 * m - p, *_hashed(back, past))[::-1]
    before = np.where(before >= 0, start - 1 - (before - (2 * m - p)), -1)
    places = np.append(before, after)
    _swap(pattern, record, places)
    found = places >= 0
    repetitions = places // pattern.size
    repetitions -= repetitions[found].min() if found.any() else 0
    return np.where(found, places % pattern.size, -1), np.where(found, repetitions, -1)


def _hashed(pattern: Int64s, record: Int64s) -> tuple[UInt64s, Int64s, UInt64s]:
    """Hashes of the windows of both, those of the pattern also in order."""
    hashes, runs = (
        np.stack([_padded(windows(names, size), names.size) for size in SIZES]) for names in (pattern, record)
    )
    return hashes, np.argsort(hashes, axis=1, kind="stable"), runs


def windows(names: Int64s, size: int) -> UInt64s:
    """A hash of every `size` names in a row, a power of two."""
    hashes = (names.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(29)
    factor = np.array([0xBF58476D1CE4E5B9], np.uint64)
    for _ in range(size.bit_length() - 1):
        reach = names.size - hashes.size + 1
        hashes = hashes[: max(0, hashes.size - reach)] * factor + hashes[reach:]
        factor = factor * factor
    return hashes


def _padded(hashes: UInt64s, size: int) -> UInt64s:
    """As many as there are names: 0, which no window has, where one would reach beyond the end."""
    return np.append(hashes | np.uint64(1), np.zeros(size - hashes.size, np.uint64))


@jit("i8(u8[:, :], i8[:, :], u8[:, :], i8, i8)")
def _long_run(hashes: UInt64s, order: Int64s, runs: UInt64s, i: int, p: int) -> int:
    """Where the pattern, from `p` on, goes on as the record at `i` for as long as possible; -1 if nowhere."""
    m = hashes.shape[1]
    for size in range(hashes.shape[0]):
        wanted = runs[size, i]
        for start in (p % m, 0):
            low, high = 0, m
            while low < high:
                middle = (low + high) // 2
                at = order[size, middle]
                if hashes[size, at] < wanted or (hashes[size, at] == wanted and at < start):
                    low = middle + 1
                else:
                    high = middle
            if wanted and low < m and hashes[size, order[size, low]] == wanted:
                place = p - p % m + order[size, low]
                return int(place if place >= p else place + m)
    return -1


@jit("Tuple((i8, i8))(i8[:, :], i8, i8)", inline=True)
def _before(reach: Int64s, d: int, k: int) -> tuple[int, int]:
    """How far one comes by an entry that the record has beyond the pattern, and by one that it lacks; -1 if not."""
    more = reach[d - 1, k - 1] + 1 if k > MOST_EDITS - d else -1
    less = reach[d - 1, k + 1] if k < MOST_EDITS + d else -1
    return more, less


@jit("Tuple((i8, i8))(i8[:], i8[:], i8, i8, i8, i8[:, :])")
def _fewest_edits(pattern: Int64s, record: Int64s, i: int, stop: int, p: int, reach: Int64s) -> tuple[int, int]:
    """Edits, and the diagonal on which ENOUGH equal names follow them or the record stops; (-1, 0) if too many.

    `reach[d, k]`: how far in the record one comes with `d` edits if it then is `k - MOST_EDITS` beyond the pattern.
    """
    m = pattern.size
    reach[0, MOST_EDITS] = 0
    for d in range(1, MOST_EDITS):
        for k in range(MOST_EDITS - d, MOST_EDITS + d + 1, 2):
            more, less = _before(reach, d, k)
            x = begin = min(max(more, less), stop - i)
            y = p + x - (k - MOST_EDITS)
            while i + x < stop and record[i + x] == pattern[y % m]:
                x, y = x + 1, y + 1
            reach[d, k] = x
            if x - begin >= ENOUGH or i + x >= stop:
                return d, k
    return -1, 0


@jit("void(i8[:], i8, i8, i8, i8, i8, i8[:, :])")
def _place(places: Int64s, i: int, stop: int, p: int, d: int, k: int, reach: Int64s) -> None:
    """Write the places of what is equal along the way of `_fewest_edits`, from its end back."""
    x = reach[d, k]
    while d > 0:
        more, less = _before(reach, d, k)
        for same in range(min(max(more, less), stop - i), x):
            places[i + same] = p + same - (k - MOST_EDITS)
        d, k, x = (d - 1, k + 1, less) if less >= more else (d - 1, k - 1, more - 1)


@jit("Tuple((i8, i8))(u8[:, :], i8[:, :], u8[:, :])")
def _beginning(hashes: UInt64s, order: Int64s, runs: UInt64s) -> tuple[int, int]:
    """The first entry of the record with which a long run begins, and its place in the pattern."""
    m = hashes.shape[1]
    for i in range(runs.shape[1]):
        place = _long_run(hashes, order, runs, i, 0)
        if place >= 0:
            return i, place % m
    return 0, 0


@jit("i8[:](i8[:], i8[:], i8[:], i8, u8[:, :], i8[:, :], u8[:, :])")
def _walk(
    pattern: Int64s, record: Int64s, known: Int64s, p: int, hashes: UInt64s, order: Int64s, runs: UInt64s
) -> Int64s:
    """Place of each entry of the record in the pattern without end, from `p` on; -1 if it has none."""
    n, m = record.size, pattern.size
    places = np.full(n, -1, np.int64)
    reach = np.zeros((MOST_EDITS, 2 * MOST_EDITS + 1), np.int64)
    following = np.full(n + 1, n, np.int64)  # the next entry that is known
    for i in range(n - 1, -1, -1):
        following[i] = i if known[i] >= 0 else following[i + 1]
    i, lost = 0, False
    while i < n:
        if known[i] >= 0:
            ahead = (known[i] - p) % m
            p += ahead if ahead <= m // 2 else ahead - m
        elif lost or record[i] != pattern[p % m]:
            d, k = (-1, 0) if lost else _fewest_edits(pattern, record, i, following[i], p, reach)
            if d >= 0:
                _place(places, i, following[i], p, d, k, reach)
                p, i = p + reach[d, k] - (k - MOST_EDITS), i + reach[d, k]
                continue
            place = _long_run(hashes, order, runs, i, p)
            lost = place < 0
            if lost:
                i += 1
                continue
            p = place
        lost = False
        places[i] = p
        i, p = i + 1, p + 1
    return places


@jit("void(i8[:], i8[:], i8[:])")
def _swap(pattern: Int64s, record: Int64s, places: Int64s) -> None:
    """Give entries without a place one near by that has their name and that no other entry has."""
    m = pattern.size
    used = np.zeros(places.max() + m + SWAPPED + 2 if places.size else 0, np.bool_)
    for place in places:
        if place >= 0:
            used[place] = True
    last = -1
    for i in range(record.size):
        if places[i] < 0 <= last:
            for place in range(max(last - SWAPPED, 0), last + SWAPPED + 2):
                if not used[place] and pattern[place % m] == record[i]:
                    places[i] = place
                    used[place] = True
                    break
        elif places[i] >= 0:
            last = places[i]
