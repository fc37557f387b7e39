// y = W x + u B^T for a frozen NVFP4 matrix W, on Hopper (sm_90a).
//
// Idea. The weight is the left operand of the tensor core and lives in registers: a thread decodes 8 codes of one row
// into four BF16 pairs and hands them to wgmma, so no decoded byte touches memory. Activations are the right operand,
// in shared memory. Both must agree on the order of k inside a tile, and that order is free: `pack_activations` writes
// the activations once in the order in which a decoder finds its codes, as the exact image of a shared-memory tile, so
// that one bulk copy brings it in.
//
// Decoding. E2M1 bits placed on the boundary of a BF16's exponent and mantissa read as value * 2^-126 (subnormals
// included). One multiplication by block_scale * 2^118 gives value * block_scale * 2^-8, exactly: six significant bits.
// The tensor scale and the 2^8 are one FP32 factor at the end.
//
// Work. The K-tiles of all output tiles form one line that is cut in equal pieces, one for each CTA ("stream-K"). With
// one token tile the cuts depend on N, K and the number of SMs only, partial sums are added in a fixed order, and so a
// row's result does not depend on how many other rows are in the batch. The CTA that holds the first K-tile of an
// output tile finishes it: it adds the pieces of the CTAs after it, applies the tensor scale, runs the LoRA columns as
// further K-tiles and stores. CTA numbers run against blockIdx, so a CTA waits only for CTAs scheduled before it.
//
// Compile-time: MT tokens a tile (multiple of 8, <= 256); WGS warpgroups that multiply, RM blocks of 64 rows each; SUB
// K-tiles of 128 a stage, UNIT K-tiles a unit of work; STAGES of the ring;
// CTAS that share an SM; REGS_MULTIPLY and REGS_COPY registers a thread;
// SCALE_BOXES whether block scales come through the ring, 256 k at a time, which needs rows of a multiple of 16 bytes.

struct Params {
  const u8* scales;      // [N, K/16]
  const u8* tiles;       // activations, [m tiles][K tiles][TILE_BYTES]
  const u8* lora_tiles;  // u, [m tiles][LoRA stages][LORA_BYTES]
  u16* y;                // [M, N] BF16
  float* partial;        // [CTAs][ACC * RM * CONSUMERS]
  u32* flags;            // [CTAs][WGS], zero at start
  float factor;          // tensor scale * 2^8
  int m, n, k;
  int m_tiles, units, n_tiles;
  int lora_stages;
};

// Where the line of all units is cut. Output tiles that share rows of W are neighbours.
struct Line {
  int total, units;
  DEVICE Line(const Params& p) : total(p.n_tiles * p.m_tiles * p.units), units(p.units) {}
  DEVICE int begin(int cta) const { return (int)((long long)total * cta / gridDim.x); }
  DEVICE int owner(int unit) const { return (int)(((long long)(unit + 1) * gridDim.x - 1) / total); }
};

// A CTA's piece of the line, cut into segments that stay inside one output tile.
struct Segments {
  int unit, end, units;
  int tile, first, last;  // units first .. last - 1 of the tile
  DEVICE Segments(const Line& line, int cta) : unit(line.begin(cta)), end(line.begin(cta + 1)), units(line.units) {}
  DEVICE bool next() {
    if (unit >= end) return false;
    tile = unit / units;
    first = unit - tile * units;
    last = min(units, first + end - unit);
    unit += last - first;
    return true;
  }
};

// The order of stages: segments; in each its K-tiles, then the LoRA columns if the segment finishes an output tile.
struct Walk {
  Segments seg;
  int m_tiles, lora_stages;
  int at, end, row, token_tile;  // stage of the segment (or of LoRA), first row of W
  bool lora, more;
  DEVICE Walk(const Params& p, int cta) : seg(Line(p), cta), m_tiles(p.m_tiles), lora_stages(p.lora_stages) { open(); }
  DEVICE void open() {
    lora = false;
    more = seg.next();
    at = seg.first * STAGES_A_UNIT;
    end = seg.last * STAGES_A_UNIT;
    row = seg.tile / m_tiles * BLOCK_N;
    token_tile = seg.tile % m_tiles;
  }
  DEVICE void advance() {
    if (++at < end) return;
    if (!lora && seg.first == 0 && lora_stages > 0) {
      lora = true;
      at = 0;
      end = lora_stages;
    } else {
      open();
    }
  }
};

// Weights do not depend on the kernel before this one, tokens do.
DEVICE void load_rows(const Maps& maps, const Walk& walk, u32 stage, u32 bar) {
  barrier_expect(bar, W_BYTES + (walk.lora ? LORA_BYTES : X_BYTES + S_BYTES));
  box_copy(stage + X_BYTES, walk.lora ? maps.lora_b : maps.weights, walk.at * W_ROW, walk.row, bar);
  if (SCALE_BOXES && !walk.lora) box_copy(stage + X_BYTES + W_BYTES, maps.scales, walk.at * SUB / 2 * 16, walk.row, bar);
}

DEVICE void load_tokens(const Params& p, const Walk& walk, u32 stage, u32 bar) {
  if (walk.lora)
    bulk_copy(stage, p.lora_tiles + (size_t)(walk.token_tile * p.lora_stages + walk.at) * LORA_BYTES, LORA_BYTES, bar);
  else
    bulk_copy(stage, p.tiles + (size_t)(walk.token_tile * p.units * STAGES_A_UNIT + walk.at) * X_BYTES, X_BYTES, bar);
}

// One thread feeds the ring.
DEVICE void produce(const Params& p, const Maps& maps, u32 ring, u32 full, u32 empty, int cta) {
  Walk walk(p, cta), behind(p, cta);
  int filled = 0;
  for (; filled < STAGES && walk.more; ++filled, walk.advance())
    load_rows(maps, walk, ring + filled * STAGE_BYTES, full + filled * 8);
  previous_kernel_done();
  for (int i = 0; i < filled; ++i, behind.advance()) load_tokens(p, behind, ring + i * STAGE_BYTES, full + i * 8);
  int slot = 0;
  u32 phase = 0;
  for (; walk.more; walk.advance()) {
    const u32 stage = ring + slot * STAGE_BYTES, bar = full + slot * 8;
    barrier_wait(empty + slot * 8, phase);
    load_rows(maps, walk, stage, bar);
    load_tokens(p, walk, stage, bar);
    if (++slot == STAGES) {
      slot = 0;
      phase ^= 1;
    }
  }
}

// Eight codes of a row -> four BF16 pairs; pair i holds the codes i and i + 4. A code "seem" times 2^12 + 2^6 has its
// sign in the sign's place and "eem" on the boundary of exponent and mantissa, nothing overlaps, and the rest is masked.
DEVICE void decode(u32 codes, u32 scale, u32& p0, u32& p1, u32& p2, u32& p3) {
  constexpr u32 EVEN = 0x000F000Fu, ODD = 0x00F000F0u, KEEP = 0x81C081C0u;
  const u32 high = codes >> 8;
  p0 = multiply(((codes & EVEN) * 0x1040u) & KEEP, scale);
  p1 = multiply(((codes & ODD) * 0x0104u) & KEEP, scale);
  p2 = multiply(((high & EVEN) * 0x1040u) & KEEP, scale);
  p3 = multiply(((high & ODD) * 0x0104u) & KEEP, scale);
}

// Two E4M3 bytes -> block scale * 2^118, each twice in a BF16 pair.
DEVICE void decode_scales(u32 two, u32& first, u32& second) {
  const u32 bits = (__byte_perm(two, 0, 0x4140) << 4) & 0x07F007F0u;  // scale * 2^-120
  const u32 up = 0x7B007B00u;                                        // 2^119
  const u32 both = multiply(multiply(bits, up), up);
  first = __byte_perm(both, 0, 0x1010);
  second = __byte_perm(both, 0, 0x3232);
}

struct Ring {
  u32 base, full, empty;
  int slot;
  u32 phase;
  DEVICE u32 acquire() {
    barrier_wait(full + slot * 8, phase);
    return base + slot * STAGE_BYTES;
  }
  DEVICE u32 advance() {
    const u32 released = empty + slot * 8;
    if (++slot == STAGES) {
      slot = 0;
      phase ^= 1;
    }
    return released;
  }
};

DEVICE void release(u32 bar, bool condition) {
  __syncwarp();
  barrier_arrive_if(bar, condition);
}

DEVICE void load_shared16(u32 (&v)[4], u32 address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address));
}
DEVICE u32 load_shared2(u32 address) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}
DEVICE u32 load_shared4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
// Where a stage keeps 16 bytes of a row of W. Rows of 128 bytes are swizzled by the copy engine.
DEVICE u32 chunk_offset(int row, int chunk) { return row * W_ROW + ((SUB == 2 ? chunk ^ (row & 7) : chunk) << 4); }

// The block scales of a row for one stage as the lane needs them: two for each K-tile, lowest k lowest. Without boxes they
// are fetched from memory one stage ahead.
struct Scales {
  const u8* row[RM][2];
  u32 next[RM][2];
  int limit;  // past the end of K the codes are zero, but a scale must not be NaN
  DEVICE Scales(const Params& p, int row0) {
    if constexpr (!SCALE_BOXES) {
      limit = (p.k >> 4) - 2 * SUB;
#pragma unroll
      for (int r = 0; r < RM; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) row[r][h] = p.scales + (size_t)min(row0 + 64 * r + 8 * h, p.n - 1) * (p.k >> 4);
    }
  }
  DEVICE void fetch(int at, int quad) {
    if constexpr (!SCALE_BOXES) {
      const int byte = min(at * (8 * SUB) + quad * (2 * SUB), limit);
#pragma unroll
      for (int r = 0; r < RM; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (SUB == 2) next[r][h] = __ldg((const u32*)(row[r][h] + byte));
          else next[r][h] = __ldg((const u16*)(row[r][h] + byte));
        }
    }
  }
  DEVICE void read(u32 box, int at, int row0, int quad) {
    if constexpr (SCALE_BOXES) {
#pragma unroll
      for (int r = 0; r < RM; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 from = box + (row0 + 64 * r + 8 * h) * 16;
          if constexpr (SUB == 2) next[r][h] = load_shared4(from + quad * 4);
          else next[r][h] = load_shared2(from + (at & 1) * 8 + quad * 2);
        }
    }
  }
};

// All stages of one segment. A thread's rows are row0 + 64 r + 8 h.
DEVICE void multiply_tiles(Ring& ring, Scales& scales, float (&acc)[RM][ACC], int begin, int end, int row0, int lane) {
  u32 a[2][RM][8 * GROUP];
  u32 to_release = 0;
  const int quad = lane & 3;
  scales.fetch(begin, quad);
  for (int at = begin; at < end; ++at) {
    const u32 stage = ring.acquire();
    scales.read(stage + X_BYTES + W_BYTES, at, row0, quad);
    u32 bytes[RM][2];
#pragma unroll
    for (int r = 0; r < RM; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) bytes[r][h] = scales.next[r][h];
    scales.fetch(min(at + 1, end - 1), quad);
    const u64 tokens = descriptor(stage);
#pragma unroll
    for (int sub = 0; sub < SUB; ++sub) {
      u32 codes[RM][2][4];
      u32 scale[RM][2][2];
#pragma unroll
      for (int r = 0; r < RM; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + 64 * r + 8 * h;
          load_shared16(codes[r][h], stage + X_BYTES + chunk_offset(row, SUB * quad + sub));
          decode_scales(sub == 0 ? bytes[r][h] : bytes[r][h] >> 16, scale[r][h][0], scale[r][h][1]);
        }
#pragma unroll
      for (int group = 0; group < 4 / GROUP; ++group) {
        u32(&buffer)[RM][8 * GROUP] = a[group & 1];
        u64 x[2 * GROUP];
#pragma unroll
        for (int w = 0; w < GROUP; ++w) {
          const int word = group * GROUP + w;
#pragma unroll
          for (int r = 0; r < RM; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              u32* to = buffer[r] + 8 * w + h;
              decode(codes[r][h][word], scale[r][h][word >> 1], to[0], to[2], to[4], to[6]);
            }
#pragma unroll
          for (int step = 0; step < 2; ++step)
            x[2 * w + step] = at_byte(tokens, sub * TILE_BYTES + (word >> 1) * (MT * 128) + ((word & 1) * 2 + step) * 32);
        }
#pragma unroll
        for (int r = 0; r < RM; ++r) pin(buffer[r]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2 * GROUP; ++step)
#pragma unroll
          for (int r = 0; r < RM; ++r) {
            const u32* from = buffer[r] + 4 * step;
            wgmma(acc[r], from[0], from[1], from[2], from[3], x[step]);
          }
        wgmma_commit();
        wgmma_wait<1>();
        // Everything before this group has been read.
        if (sub == 0 && group == 0) release(to_release, lane == 0 && at > begin);
      }
    }
    to_release = ring.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int r = 0; r < RM; ++r) pin(acc[r]);
  release(to_release, lane == 0);
}

DEVICE void multiply_lora(Ring& ring, float (&acc)[RM][ACC], int count, int row0, int lane) {
  constexpr int STEPS = 2 * SUB;
  const int quad = lane & 3;
  for (int it = 0; it < count; ++it) {
    const u32 stage = ring.acquire();
    u32 a[RM][STEPS][4];
#pragma unroll
    for (int r = 0; r < RM; ++r) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + 64 * r + 8 * h;
          a[r][step][h] = load_shared4(stage + X_BYTES + chunk_offset(row, 2 * step) + 4 * quad);
          a[r][step][2 + h] = load_shared4(stage + X_BYTES + chunk_offset(row, 2 * step + 1) + 4 * quad);
        }
        pin(a[r][step]);
      }
      pin(acc[r]);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int r = 0; r < RM; ++r)
        wgmma(acc[r], a[r][step][0], a[r][step][1], a[r][step][2], a[r][step][3], descriptor(stage + step * 32));
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < RM; ++r) pin(acc[r]);
    release(ring.advance(), lane == 0);
  }
}

DEVICE void publish_partial(const Params& p, const float (&acc)[RM][ACC], int cta, int tid) {
  float4* out = (float4*)(p.partial + (size_t)cta * (ACC * RM * CONSUMERS));
#pragma unroll
  for (int r = 0; r < RM; ++r)
#pragma unroll
    for (int i = 0; i < ACC / 4; ++i)
      out[(r * (ACC / 4) + i) * CONSUMERS + tid] =
          make_float4(acc[r][4 * i], acc[r][4 * i + 1], acc[r][4 * i + 2], acc[r][4 * i + 3]);
  asm volatile("bar.arrive %0, 160;" ::"r"((tid >> 7) + 1) : "memory");
}

// One warp waits for the pieces to be written and raises the flags, so that those who multiply need not.
DEVICE void announce_partial(const Params& p, int cta, int lane) {
  for (int group = 0; group < WGS; ++group) {
    asm volatile("bar.sync %0, 160;" ::"r"(group + 1) : "memory");
    if (lane == 0) {
      __threadfence();
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(p.flags + cta * WGS + group) : "memory");
    }
  }
}

// Adds the pieces of CTAs first .. last in that order. All flags are awaited at once, several pieces are in flight.
DEVICE void add_partials(const Params& p, float (&acc)[RM][ACC], int first, int last, int tid) {
  constexpr int TOGETHER = REGS_MULTIPLY < 128 || ACC * RM >= 32 ? 1 : ACC * RM >= 16 ? 2 : 4;
  const int group = tid >> 7;
  for (int other = first + (tid & 31); other <= last; other += 32) {
    u32 ready;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(p.flags + other * WGS + group) : "memory");
    } while (ready == 0);
  }
  __syncwarp();
  const float4* in = (const float4*)p.partial + tid;
  for (int other = first; other <= last; other += TOGETHER) {
    float4 v[TOGETHER][RM * ACC / 4];
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
      for (int i = 0; i < RM * ACC / 4; ++i)
        if (other + t <= last) v[t][i] = __ldcg(in + ((size_t)(other + t) * (RM * ACC / 4) + i) * CONSUMERS);
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
      for (int i = 0; i < RM * ACC / 4; ++i)
        if (other + t <= last) {
          float* sum = &acc[i / (ACC / 4)][4 * (i % (ACC / 4))];
          sum[0] += v[t][i].x;
          sum[1] += v[t][i].y;
          sum[2] += v[t][i].z;
          sum[3] += v[t][i].w;
        }
  }
}

// Accumulator 4 i + 2 h + e of block r is row row0 + 64 r + 8 h, token 8 i + 2 quad + e. Lanes with neighbouring rows swap
// a token, so that each holds two rows of one token and stores them at once.
DEVICE void store(const Params& p, const float (&acc)[RM][ACC], int row, int mt, int lane) {
  const int odd = (lane >> 2) & 1;
  const int first = row - odd;
  const bool together = (p.n & 1) == 0;
#pragma unroll
  for (int i = 0; i < MT / 8; ++i)
#pragma unroll
    for (int r = 0; r < RM; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float even = acc[r][4 * i + 2 * h], other = acc[r][4 * i + 2 * h + 1];
        const float received = __shfl_xor_sync(0xFFFFFFFFu, odd ? even : other, 4);
        const u32 value = odd ? pair(received, other) : pair(even, received);
        const int token = mt * MT + 8 * i + 2 * (lane & 3) + odd;
        const int n = first + 64 * r + 8 * h;
        if (token >= p.m || n >= p.n) continue;
        u16* out = p.y + (size_t)token * p.n + n;
        if (together) {
          *(u32*)out = value;
        } else {
          out[0] = (u16)value;
          if (n + 1 < p.n) out[1] = (u16)(value >> 16);
        }
      }
}

DEVICE void consume(const Params& p, u32 base, u32 full, u32 empty, int cta, int tid) {
  Ring ring{base, full, empty, 0, 0};
  const int lane = tid & 31, warp = tid >> 5;
  const int row0 = (warp >> 2) * (64 * RM) + (warp & 3) * 16 + (lane >> 2);
  float acc[RM][ACC];
  previous_kernel_done();
  const Line line(p);
  Segments seg(line, cta);
  while (seg.next()) {
    const int n0 = seg.tile / p.m_tiles * BLOCK_N;
#pragma unroll
    for (int r = 0; r < RM; ++r) {
#pragma unroll
      for (int i = 0; i < ACC; ++i) acc[r][i] = 0.0f;
      pin(acc[r]);
    }
    Scales scales(p, n0 + row0);
    multiply_tiles(ring, scales, acc, seg.first * STAGES_A_UNIT, seg.last * STAGES_A_UNIT, row0, lane);
    if (seg.first > 0) {
      publish_partial(p, acc, cta, tid);
      continue;
    }
    if (seg.last < line.units) add_partials(p, acc, cta + 1, line.owner((seg.tile + 1) * line.units - 1), tid);
#pragma unroll
    for (int r = 0; r < RM; ++r)
#pragma unroll
      for (int i = 0; i < ACC; ++i) acc[r][i] *= p.factor;
    multiply_lora(ring, acc, p.lora_stages, row0, lane);
    store(p, acc, n0 + row0, seg.tile % p.m_tiles, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    fused_linear(const __grid_constant__ Maps maps, const __grid_constant__ Params p) {
  extern __shared__ u8 shared[];
  __shared__ alignas(8) u64 bars[2 * STAGES];
  const int tid = threadIdx.x;
  const u32 ring = (smem_address(shared) + 1023) & ~1023u;
  const u32 full = smem_address(bars), empty = full + STAGES * 8;
  if (tid == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, CONSUMERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int cta = gridDim.x - 1 - blockIdx.x;
  if (tid >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGS_COPY));
    if (tid == CONSUMERS) produce(p, maps, ring, full, empty, cta);
    if (tid >= CONSUMERS + 32 && tid < CONSUMERS + 64) {
      Segments seg(Line(p), cta);
      if (seg.next() && seg.first > 0) announce_partial(p, cta, tid & 31);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGS_MULTIPLY));
    consume(p, ring, full, empty, cta, tid);
  }
}
