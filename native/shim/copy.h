/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A copy for readers that poll the destination: bytes become visible in ascending order of address, in units of 8 bytes
 * (where the destination is aligned to 8; the edges of another one go byte by byte), and whoever sees the last 8 bytes of a
 * 128-byte line (counted from the first aligned word) with acquire sees the whole line and everything before. memcpy gives no
 * such order. source and destination do not overlap. No locks, no syscalls.
 */
#ifndef DQ_SHIM_COPY_H
#define DQ_SHIM_COPY_H

#include <stddef.h>

void dq_copy_ordered(void *destination, const void *source, size_t bytes);

#endif
