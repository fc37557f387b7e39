// Packs the activations and projects them onto LoRA's A in the same launch: u = scale * x A^T, for short batches.
//
// Clusters of PROJECT_CTAS. The first ones project PROJECT_ROWS tokens each, the others pack. A projecting cluster's warps
// share K in pieces of 64: a lane takes 16 consecutive k of a row of A and of a token, which is four steps of a tensor-core
// product when both use the same order. Sums are added in a fixed order, over the warps of a CTA in shared memory and then
// over the CTAs of the cluster. u is stored as the image of the LoRA stages that fused_linear reads.
//
// Compile-time: RANK, the columns of u in multiples of 16, at most 128; PROJECT_CTAS of a cluster, 8 or 16.

constexpr int PROJECT_WARPS = 16, PROJECT_THREADS = 32 * PROJECT_WARPS;
constexpr int PROJECT_ROWS = MT < 16 ? 8 : 16;
constexpr int PIECE_K = 64, LANE_K = PIECE_K / 4;

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

// What a lane takes of one row; zero past the end of the row or for a row that is none.
DEVICE void load_row_piece(u32 (&v)[LANE_K / 2], const u16* row, int k, int end, bool valid) {
#pragma unroll
  for (int i = 0; i < LANE_K / 8; ++i) {
    const uint4 in = valid && k < end ? __ldg((const uint4*)(row + k) + i) : make_uint4(0, 0, 0, 0);
    v[4 * i] = in.x, v[4 * i + 1] = in.y, v[4 * i + 2] = in.z, v[4 * i + 3] = in.w;
  }
}

// This warp's share of u^T: rows of A down, tokens across.
DEVICE void project_pieces(float (&sum)[RANK / 16][PROJECT_ROWS / 8][4], const u16* x, const u16* a, int row0, int m, int k,
                           int first, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  for (int piece = first; piece * PIECE_K < k; piece += PROJECT_CTAS * PROJECT_WARPS) {
    const int at = piece * PIECE_K + LANE_K * quad;
    u32 tokens[PROJECT_ROWS / 8][LANE_K / 2], rows[RANK / 8][LANE_K / 2];
#pragma unroll
    for (int r = 0; r < RANK / 8; ++r) load_row_piece(rows[r], a + (size_t)(8 * r + group) * k, at, k, true);
#pragma unroll
    for (int t = 0; t < PROJECT_ROWS / 8; ++t) {
      const int row = row0 + 8 * t + group;
      load_row_piece(tokens[t], x + (size_t)row * k, at, k, row < m);
    }
#pragma unroll
    for (int r = 0; r < RANK / 16; ++r)
#pragma unroll
      for (int t = 0; t < PROJECT_ROWS / 8; ++t)
#pragma unroll
        for (int step = 0; step < LANE_K / 4; ++step) {
          const u32(&upper)[LANE_K / 2] = rows[2 * r], (&lower)[LANE_K / 2] = rows[2 * r + 1];
          mma(sum[r][t], upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1], tokens[t][2 * step],
              tokens[t][2 * step + 1]);
        }
  }
}

DEVICE void project(const u16* x, const u16* a, float scale, u8* lora_tiles, float* sums, int row0, int m, int k,
                    int lora_stages) {
  // [token][row of A], of each warp and then of the CTA. The odd pitch keeps lanes on different banks.
  constexpr int PITCH = RANK + 1, SIZE = PROJECT_ROWS * PITCH;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int rank = rank_in_cluster();
  float sum[RANK / 16][PROJECT_ROWS / 8][4] = {};
  project_pieces(sum, x, a, row0, m, k, warp * PROJECT_CTAS + rank, lane);
  next_kernel_may_start();  // not before: its weights would arrive ahead of A
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
#pragma unroll
    for (int w = 0; w < PROJECT_WARPS; ++w) total += sums[w * SIZE + i];
    sums[i] = total;
  }
  cluster_sync();
  // Every CTA finishes some of the image, two columns a thread; what lies past the last column is zero.
  const int pairs = PROJECT_ROWS * lora_stages * 32;
  for (int i = rank * PROJECT_THREADS + tid; i < pairs; i += PROJECT_CTAS * PROJECT_THREADS) {
    const int word = i & 31, rest = i >> 5;
    const int token = rest / lora_stages, stage = rest - token * lora_stages;
    const int column = stage * (W_ROW / 2) + 2 * word;
    u32 out = 0;
    if (word * 4 < W_ROW && column < RANK) {
      float v[2][PROJECT_CTAS];
      const u32 from = smem_address(sums + token * PITCH + column);
#pragma unroll
      for (int other = 0; other < PROJECT_CTAS; ++other) {
        v[0][other] = load_from_cta(from, other);
        v[1][other] = load_from_cta(from + 4, other);
      }
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int other = 0; other < PROJECT_CTAS; ++other) {
        low += v[0][other];
        high += v[1][other];
      }
      out = pair(low * scale, high * scale);
    }
    const int row = row0 + token, r = row % MT;
    u8* tile = lora_tiles + (size_t)(row / MT * lora_stages + stage) * LORA_BYTES + r * 128;
    *(u32*)(tile + (((word >> 2) ^ (r & 7)) << 4) + (word & 3) * 4) = out;
  }
  cluster_sync();  // the others may still read this CTA's sums
}

extern "C" __global__ void __cluster_dims__(PROJECT_CTAS, 1, 1) __launch_bounds__(PROJECT_THREADS)
    pack_and_project(const u16* x, u8* tiles, const u16* a, float scale, u8* lora_tiles, u32* flags, int m, int k, int m_tiles,
                     int k_tiles, int lora_stages, int flag_count) {
  extern __shared__ float sums[];
  previous_kernel_done();
  const int projecting = m_tiles * MT / PROJECT_ROWS * PROJECT_CTAS;
  if (blockIdx.x < projecting) {
    project(x, a, scale, lora_tiles, sums, blockIdx.x / PROJECT_CTAS * PROJECT_ROWS, m, k, lora_stages);
    return;
  }
  next_kernel_may_start();
  const int index = (blockIdx.x - projecting) * PROJECT_THREADS + threadIdx.x;
  if (index < flag_count) flags[index] = 0;
  if (index < m_tiles * MT * k_tiles * 4) pack_item(x, tiles, index, m, k, k_tiles);
}
