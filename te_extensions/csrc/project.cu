// Packs the activations and projects them onto LoRA's A in the same launch: u = scale * x A^T, for short batches.
//
// A cluster of PROJECT_CTAS serves PROJECT_ROWS tokens. Its warps share K in pieces of 64: a lane takes 16 consecutive k of
// a row of A and of a token, which is four steps of a tensor-core product when both use the same order. Sums are added in
// a fixed order, over the warps of a CTA in shared memory and then over the CTAs of the cluster. u is stored as the image
// of the LoRA stages that fused_linear reads.
//
// Compile-time: RANK, the columns of u in multiples of 16, at most 128.

constexpr int PROJECT_CTAS = 8, PROJECT_WARPS = 8, PROJECT_THREADS = 32 * PROJECT_WARPS;
constexpr int PROJECT_ROWS = MT < 16 ? 8 : 16;
constexpr int PIECE_K = 64;

DEVICE u32 rank_in_cluster() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE float load_from_cta(u32 address, u32 rank) {
  float v;
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
      : "=f"(v)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

// d [16, 8] += a [16, 16] b [16, 8].
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 BF16 of one row; zero past the end of the row or for a row that is none.
DEVICE void load_row_piece(u32 (&v)[8], const u16* row, int k, int end, bool valid) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const uint4 low = valid && k < end ? __ldg((const uint4*)(row + k)) : zero;
  const uint4 high = valid && k < end ? __ldg((const uint4*)(row + k) + 1) : zero;
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

// This warp's share of u^T: rows of A down, tokens across.
DEVICE void project_pieces(float (&sum)[RANK / 16][PROJECT_ROWS / 8][4], const u16* x, const u16* a, int row0, int m, int k,
                           int first, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  for (int piece = first; piece * PIECE_K < k; piece += PROJECT_CTAS * PROJECT_WARPS) {
    const int at = piece * PIECE_K + 16 * quad;
    u32 tokens[PROJECT_ROWS / 8][8];
#pragma unroll
    for (int t = 0; t < PROJECT_ROWS / 8; ++t) {
      const int row = row0 + 8 * t + group;
      load_row_piece(tokens[t], x + (size_t)row * k, at, k, row < m);
    }
#pragma unroll
    for (int r = 0; r < RANK / 16; ++r) {
      u32 upper[8], lower[8];
      load_row_piece(upper, a + (size_t)(16 * r + group) * k, at, k, true);
      load_row_piece(lower, a + (size_t)(16 * r + 8 + group) * k, at, k, true);
#pragma unroll
      for (int t = 0; t < PROJECT_ROWS / 8; ++t)
#pragma unroll
        for (int step = 0; step < 4; ++step)
          mma(sum[r][t], upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1], tokens[t][2 * step],
              tokens[t][2 * step + 1]);
    }
  }
}

extern "C" __global__ void __cluster_dims__(PROJECT_CTAS, 1, 1) __launch_bounds__(PROJECT_THREADS)
    pack_and_project(const u16* x, u8* tiles, const u16* a, float scale, u8* lora_tiles, u32* flags, int m, int k, int m_tiles,
                     int k_tiles, int lora_stages, int flag_count) {
  // [token][row of A], of each warp and then of the CTA. The odd pitch keeps lanes on different banks.
  constexpr int PITCH = RANK + 1, SIZE = PROJECT_ROWS * PITCH;
  extern __shared__ float sums[];
  next_kernel_may_start();
  previous_kernel_done();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int rank = rank_in_cluster();
  const int row0 = blockIdx.x / PROJECT_CTAS * PROJECT_ROWS;
  for (int i = blockIdx.x * PROJECT_THREADS + tid; i < flag_count; i += gridDim.x * PROJECT_THREADS) flags[i] = 0;
  const int items = PROJECT_ROWS * k_tiles * 4;
  for (int i = rank * PROJECT_THREADS + tid; i < items; i += PROJECT_CTAS * PROJECT_THREADS)
    pack_item(x, tiles, row0 * k_tiles * 4 + i, m, k, k_tiles);

  float sum[RANK / 16][PROJECT_ROWS / 8][4] = {};
  project_pieces(sum, x, a, row0, m, k, rank * PROJECT_WARPS + warp, lane);
#pragma unroll
  for (int r = 0; r < RANK / 16; ++r)
#pragma unroll
    for (int t = 0; t < PROJECT_ROWS / 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[warp * SIZE + (8 * t + 2 * (lane & 3) + (i & 1)) * PITCH + 16 * r + (lane >> 2) + 8 * (i >> 1)] = sum[r][t][i];
  __syncthreads();
  for (int i = tid; i < SIZE; i += PROJECT_THREADS) {
    float total = 0.0f;
    for (int w = 0; w < PROJECT_WARPS; ++w) total += sums[w * SIZE + i];
    sums[i] = total;
  }
  cluster_sync();
  // Every CTA finishes some of the 16-byte pieces of the image, eight columns each.
  const int pieces = PROJECT_ROWS * lora_stages * 8;
  for (int i = rank * PROJECT_THREADS + tid; i < pieces; i += PROJECT_CTAS * PROJECT_THREADS) {
    const int piece = i & 7, rest = i >> 3;
    const int token = rest / lora_stages, stage = rest - token * lora_stages;
    const int column = stage * (W_ROW / 2) + piece * 8;
    u32 out[4] = {0, 0, 0, 0};
    if (piece * 16 < W_ROW && column < RANK) {
      float v[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        v[c] = 0.0f;
        for (int other = 0; other < PROJECT_CTAS; ++other)
          v[c] += load_from_cta(smem_address(sums + token * PITCH + column + c), other);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) out[c] = pair(v[2 * c] * scale, v[2 * c + 1] * scale);
    }
    const int row = row0 + token, r = row % MT;
    u8* tile = lora_tiles + (size_t)(row / MT * lora_stages + stage) * LORA_BYTES + r * 128;
    *(uint4*)(tile + ((piece ^ (r & 7)) << 4)) = make_uint4(out[0], out[1], out[2], out[3]);
  }
  cluster_sync();  // the others may still read this CTA's sums
}
