// SPDX-License-Identifier: Apache-2.0
// The pattern of pytest_nixl/worker/pattern.py on a GPU: kernels.ptx is made of this file, as its first lines say.

typedef unsigned long long u64;
typedef unsigned char u8;

#define TILE 131071ull

#ifdef __CUDACC__
#define FUNCTION __device__
#define KERNEL extern "C" __global__ void
#else // tests compile it for the processor
#define FUNCTION static
#define KERNEL static void
#endif

FUNCTION u64 word(const u64 *tile, u64 seed, u64 i)
{
    u64 number = i / TILE;
    u64 key = seed + (number + 1) * 0x9E3779B97F4A7C15ull;
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9ull;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBull;
    return tile[i - number * TILE] ^ key ^ (key >> 31);
}

// Write `size` bytes of the pattern, each XORed with a byte of `mask`, to any address.
KERNEL nixl_fill(u8 *to, u64 size, const u64 *tile, u64 seed, u64 mask)
{
    u64 step = (u64)gridDim.x * blockDim.x;
    bool aligned = ((u64)to & 7) == 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; 8 * i < size; i += step) {
        u64 value = word(tile, seed, i) ^ mask;
        u64 left = size - 8 * i;
        if (aligned && left >= 8)
            *(u64 *)(to + 8 * i) = value;
        else
#pragma unroll 1
            for (u64 k = 0; k < 8 && k < left; k++)
                to[8 * i + k] = (u8)(value >> (8 * k));
    }
}

// Compare `size` bytes with the pattern: found[0] counts those that differ, and found[1], which is ~0 before, becomes
// the offset of the first of them times 256, plus what is there.
KERNEL nixl_compare(const u8 *at, u64 size, const u64 *tile, u64 seed, u64 *found)
{
    u64 step = (u64)gridDim.x * blockDim.x;
    bool aligned = ((u64)at & 7) == 0;
    u64 count = 0, first = ~0ull;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; 8 * i < size; i += step) {
        u64 left = size - 8 * i, bytes = left < 8 ? left : 8, here = 0;
        if (aligned && left >= 8)
            here = *(const u64 *)(at + 8 * i);
        else
#pragma unroll 1
            for (u64 k = 0; k < bytes; k++)
                here |= (u64)at[8 * i + k] << (8 * k);
        u64 difference = word(tile, seed, i) ^ here;
#pragma unroll 1
        for (u64 k = 0; k < bytes; k++)
            if ((difference >> (8 * k)) & 0xFF) {
                count++;
                u64 place = ((8 * i + k) << 8) | ((here >> (8 * k)) & 0xFF);
                first = place < first ? place : first;
            }
    }
    if (count) {
        atomicAdd(found, count);
        atomicMin(found + 1, first);
    }
}
