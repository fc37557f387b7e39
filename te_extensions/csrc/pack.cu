// Four 16-byte pieces of a tile row. ``index`` counts rows, their K-tiles, and the four pieces of eight k in a lane's share.
DEVICE void pack_item(const u16* x, u8* tiles, int index, int m, int k, int k_tiles) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  // Lane t of a quad decodes k = 32 (SUB t + sub) .. + 31 of each stage.
  const int word = index & 3, rest = index >> 2;
  const int row = rest / k_tiles, kt = rest - row * k_tiles;
  const int base = kt / SUB * (SUB * TILE_K) + kt % SUB * 32 + 8 * word;
  uint4 in[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int col = base + 32 * SUB * t;
    in[t] = row < m && col < k ? *(const uint4*)(x + (size_t)row * k + col) : zero;
  }
  const int r = row % MT;
  u8* tile = tiles + (size_t)((row / MT) * k_tiles + kt) * TILE_BYTES + (word >> 1) * (MT * 128) + r * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 out[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const u32 low = i < 2 ? in[t].x : in[t].y, high = i < 2 ? in[t].z : in[t].w;
      out[t] = __byte_perm(low, high, i & 1 ? 0x7632 : 0x5410);
    }
    const int piece = ((word & 1) * 2 + (i >> 1)) * 2 + (i & 1);
    *(uint4*)(tile + ((piece ^ (r & 7)) << 4)) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// x [M, K] BF16 -> tiles, u [M, R] BF16 -> lora tiles, flags = 0. A thread makes four 16-byte pieces of a tile row.
extern "C" __global__ void pack_activations(const u16* x, u8* tiles, const u16* u, u8* lora_tiles, u32* flags, int m, int k,
                                            int rank, int m_tiles, int k_tiles, int lora_stages, int flag_count) {
  next_kernel_may_start();
  previous_kernel_done();
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < flag_count) flags[index] = 0;
  const int rows = m_tiles * MT;
  const int x_threads = rows * k_tiles * 4;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  if (index < x_threads) {
    pack_item(x, tiles, index, m, k, k_tiles);
    return;
  }
  // LoRA: rows of 128 bytes, of which a stage uses the first W_ROW.
  const int lora = index - x_threads;
  if (lora < rows * lora_stages * 8) {
    const int piece = lora & 7, rest = lora >> 3;
    const int row = rest / lora_stages, stage = rest - row * lora_stages;
    const int r = row % MT, col = stage * (W_ROW / 2) + piece * 8;
    u8* tile = lora_tiles + (size_t)((row / MT) * lora_stages + stage) * LORA_BYTES + r * 128;
    const bool valid = row < m && piece * 16 < W_ROW && col < rank;
    *(uint4*)(tile + ((piece ^ (r & 7)) << 4)) = valid ? *(const uint4*)(u + (size_t)row * rank + col) : zero;
  }
}
