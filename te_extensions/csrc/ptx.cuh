// Shapes of a variant and the instructions of Hopper that CUDA C++ has no name for. First of the parts that
// `te_extensions/fused.py` joins; the compile-time settings are explained in fused_linear.cu.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BLOCK_N = 64 * RM * WGS;      // rows of W a CTA tile
constexpr int TILE_K = 128;
constexpr int STAGES_A_UNIT = UNIT / SUB;
constexpr int CONSUMERS = 128 * WGS;        // threads that multiply
constexpr int THREADS = CONSUMERS + 128;    // registers move between whole warpgroups: one is spent on the copying thread
constexpr int GROUP = RM == 1 ? 2 : 1;      // 32-bit words of codes that are decoded for one group of wgmma
constexpr int TILE_BYTES = MT * 256;        // activations of a K-tile
constexpr int LORA_BYTES = MT * 128;        // up to 64 LoRA columns
constexpr int X_BYTES = SUB * TILE_BYTES;
constexpr int W_ROW = SUB * 64;             // bytes of a row of W in a stage: codes, or 32 SUB columns of LoRA's B
constexpr int W_BYTES = BLOCK_N * W_ROW;
constexpr int S_BYTES = SCALE_BOXES ? BLOCK_N * 16 : 0;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES + S_BYTES;
constexpr int ACC = MT / 2;                 // accumulators a thread for each 64-row block

struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct Maps {
  TensorMap weights, scales, lora_b;
};

#define DEVICE __device__ __forceinline__

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }

// Predicated and not branched around: a branch between wgmma and its wait makes the compiler serialise them.
DEVICE void barrier_arrive_if(u32 bar, bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(bar),
               "r"((u32)condition)
               : "memory");
}

DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

DEVICE void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "r"(bytes), "r"(bar)
               : "memory");
}

// One box of a two-dimensional array of bytes; what lies outside the array arrives as zeros.
DEVICE void box_copy(u32 dst, const TensorMap& map, int byte, int row, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(&map), "r"(byte), "r"(row), "r"(bar)
      : "memory");
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The tensor core reads and writes registers behind the compiler's back: these pin a value to its place in the program.
template <int N>
DEVICE void pin(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(v[i])::"memory");
}
template <int N>
DEVICE void pin(u32 (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(v[i])::"memory");
}

// Right operand: K-major rows of 128 bytes, 128-byte swizzle, 8-row groups 1024 bytes apart.
constexpr u64 DESCRIPTOR = ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
DEVICE u64 descriptor(u32 address) { return DESCRIPTOR | ((address & 0x3FFFF) >> 4); }
DEVICE u64 at_byte(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// acc [64, MT] += a [64, 16] x [16, MT]; the instruction for MT is written by the host.
DEVICE void wgmma(float (&d)[ACC], u32 a0, u32 a1, u32 a2, u32 a3, u64 x) {
  WGMMA_BODY
}

DEVICE u32 multiply(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

DEVICE u32 pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DEVICE void previous_kernel_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void next_kernel_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
