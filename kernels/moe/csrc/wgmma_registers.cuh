// FP8 wgmma with the first operand in registers, for the widths that the widening grouped GEMM uses.
#pragma once

#include "hopper.cuh"

namespace antiphon {

// d[64, N] (+)= a[64, 32] (registers) x b[N, 32]^T (shared memory), e4m3 x e4m3 -> float32.
// d: lane (g, t) of a warp holds rows g and g + 8 of its 16, columns 8 j + 2 t + {0, 1}, at 4 j + {0, 1} and
// 4 j + {2, 3}. a: row g columns 4 t .. 4 t + 3, row g + 8 the same, then both rows 16 columns on.
#ifndef ANTIPHON_ON_HOST
template <int N>
__device__ __forceinline__ void wgmma_e4m3_registers(float* d, const uint32_t* a, uint64_t b, int accumulate);

// The sums of N columns, in the instruction's text and as its operands: four for each 8 columns.
#define ANTIPHON_SUMS(at) "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3])

#define ANTIPHON_TEXT_8 "%0, %1, %2, %3"
#define ANTIPHON_TEXT_16 ANTIPHON_TEXT_8 ", %4, %5, %6, %7"
#define ANTIPHON_TEXT_24 ANTIPHON_TEXT_16 ", %8, %9, %10, %11"
#define ANTIPHON_TEXT_32 ANTIPHON_TEXT_24 ", %12, %13, %14, %15"
#define ANTIPHON_TEXT_40 ANTIPHON_TEXT_32 ", %16, %17, %18, %19"
#define ANTIPHON_TEXT_48 ANTIPHON_TEXT_40 ", %20, %21, %22, %23"
#define ANTIPHON_TEXT_56 ANTIPHON_TEXT_48 ", %24, %25, %26, %27"
#define ANTIPHON_TEXT_64 ANTIPHON_TEXT_56 ", %28, %29, %30, %31"
#define ANTIPHON_TEXT_72 ANTIPHON_TEXT_64 ", %32, %33, %34, %35"
#define ANTIPHON_TEXT_80 ANTIPHON_TEXT_72 ", %36, %37, %38, %39"
#define ANTIPHON_TEXT_88 ANTIPHON_TEXT_80 ", %40, %41, %42, %43"
#define ANTIPHON_TEXT_96 ANTIPHON_TEXT_88 ", %44, %45, %46, %47"
#define ANTIPHON_TEXT_104 ANTIPHON_TEXT_96 ", %48, %49, %50, %51"
#define ANTIPHON_TEXT_112 ANTIPHON_TEXT_104 ", %52, %53, %54, %55"
#define ANTIPHON_TEXT_120 ANTIPHON_TEXT_112 ", %56, %57, %58, %59"
#define ANTIPHON_TEXT_128 ANTIPHON_TEXT_120 ", %60, %61, %62, %63"
#define ANTIPHON_TEXT_136 ANTIPHON_TEXT_128 ", %64, %65, %66, %67"
#define ANTIPHON_TEXT_144 ANTIPHON_TEXT_136 ", %68, %69, %70, %71"
#define ANTIPHON_TEXT_152 ANTIPHON_TEXT_144 ", %72, %73, %74, %75"
#define ANTIPHON_TEXT_160 ANTIPHON_TEXT_152 ", %76, %77, %78, %79"
#define ANTIPHON_TEXT_168 ANTIPHON_TEXT_160 ", %80, %81, %82, %83"
#define ANTIPHON_TEXT_176 ANTIPHON_TEXT_168 ", %84, %85, %86, %87"
#define ANTIPHON_TEXT_184 ANTIPHON_TEXT_176 ", %88, %89, %90, %91"
#define ANTIPHON_TEXT_192 ANTIPHON_TEXT_184 ", %92, %93, %94, %95"
#define ANTIPHON_TEXT_200 ANTIPHON_TEXT_192 ", %96, %97, %98, %99"
#define ANTIPHON_TEXT_208 ANTIPHON_TEXT_200 ", %100, %101, %102, %103"
#define ANTIPHON_TEXT_216 ANTIPHON_TEXT_208 ", %104, %105, %106, %107"
#define ANTIPHON_TEXT_224 ANTIPHON_TEXT_216 ", %108, %109, %110, %111"
#define ANTIPHON_TEXT_232 ANTIPHON_TEXT_224 ", %112, %113, %114, %115"
#define ANTIPHON_TEXT_240 ANTIPHON_TEXT_232 ", %116, %117, %118, %119"
#define ANTIPHON_TEXT_248 ANTIPHON_TEXT_240 ", %120, %121, %122, %123"
#define ANTIPHON_TEXT_256 ANTIPHON_TEXT_248 ", %124, %125, %126, %127"

#define ANTIPHON_SUMS_8 ANTIPHON_SUMS(0)
#define ANTIPHON_SUMS_16 ANTIPHON_SUMS_8, ANTIPHON_SUMS(4)
#define ANTIPHON_SUMS_24 ANTIPHON_SUMS_16, ANTIPHON_SUMS(8)
#define ANTIPHON_SUMS_32 ANTIPHON_SUMS_24, ANTIPHON_SUMS(12)
#define ANTIPHON_SUMS_40 ANTIPHON_SUMS_32, ANTIPHON_SUMS(16)
#define ANTIPHON_SUMS_48 ANTIPHON_SUMS_40, ANTIPHON_SUMS(20)
#define ANTIPHON_SUMS_56 ANTIPHON_SUMS_48, ANTIPHON_SUMS(24)
#define ANTIPHON_SUMS_64 ANTIPHON_SUMS_56, ANTIPHON_SUMS(28)
#define ANTIPHON_SUMS_72 ANTIPHON_SUMS_64, ANTIPHON_SUMS(32)
#define ANTIPHON_SUMS_80 ANTIPHON_SUMS_72, ANTIPHON_SUMS(36)
#define ANTIPHON_SUMS_88 ANTIPHON_SUMS_80, ANTIPHON_SUMS(40)
#define ANTIPHON_SUMS_96 ANTIPHON_SUMS_88, ANTIPHON_SUMS(44)
#define ANTIPHON_SUMS_104 ANTIPHON_SUMS_96, ANTIPHON_SUMS(48)
#define ANTIPHON_SUMS_112 ANTIPHON_SUMS_104, ANTIPHON_SUMS(52)
#define ANTIPHON_SUMS_120 ANTIPHON_SUMS_112, ANTIPHON_SUMS(56)
#define ANTIPHON_SUMS_128 ANTIPHON_SUMS_120, ANTIPHON_SUMS(60)
#define ANTIPHON_SUMS_136 ANTIPHON_SUMS_128, ANTIPHON_SUMS(64)
#define ANTIPHON_SUMS_144 ANTIPHON_SUMS_136, ANTIPHON_SUMS(68)
#define ANTIPHON_SUMS_152 ANTIPHON_SUMS_144, ANTIPHON_SUMS(72)
#define ANTIPHON_SUMS_160 ANTIPHON_SUMS_152, ANTIPHON_SUMS(76)
#define ANTIPHON_SUMS_168 ANTIPHON_SUMS_160, ANTIPHON_SUMS(80)
#define ANTIPHON_SUMS_176 ANTIPHON_SUMS_168, ANTIPHON_SUMS(84)
#define ANTIPHON_SUMS_184 ANTIPHON_SUMS_176, ANTIPHON_SUMS(88)
#define ANTIPHON_SUMS_192 ANTIPHON_SUMS_184, ANTIPHON_SUMS(92)
#define ANTIPHON_SUMS_200 ANTIPHON_SUMS_192, ANTIPHON_SUMS(96)
#define ANTIPHON_SUMS_208 ANTIPHON_SUMS_200, ANTIPHON_SUMS(100)
#define ANTIPHON_SUMS_216 ANTIPHON_SUMS_208, ANTIPHON_SUMS(104)
#define ANTIPHON_SUMS_224 ANTIPHON_SUMS_216, ANTIPHON_SUMS(108)
#define ANTIPHON_SUMS_232 ANTIPHON_SUMS_224, ANTIPHON_SUMS(112)
#define ANTIPHON_SUMS_240 ANTIPHON_SUMS_232, ANTIPHON_SUMS(116)
#define ANTIPHON_SUMS_248 ANTIPHON_SUMS_240, ANTIPHON_SUMS(120)
#define ANTIPHON_SUMS_256 ANTIPHON_SUMS_248, ANTIPHON_SUMS(124)

// A, B, P: numbers of the operands behind the sums, N / 2 and on.
#define ANTIPHON_WGMMA(N, A, B, P)                                                                                   \
  template <>                                                                                                        \
  __device__ __forceinline__ void wgmma_e4m3_registers<N>(float* d, const uint32_t* a, uint64_t b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" ANTIPHON_TEXT_##N "}, {" A "}, " B     \
                 ", p, 1, 1;\n}\n"                                                                                   \
                 : ANTIPHON_SUMS_##N                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
  }

ANTIPHON_WGMMA(8, "%4, %5, %6, %7", "%8", "%9")
ANTIPHON_WGMMA(16, "%8, %9, %10, %11", "%12", "%13")
ANTIPHON_WGMMA(24, "%12, %13, %14, %15", "%16", "%17")
ANTIPHON_WGMMA(32, "%16, %17, %18, %19", "%20", "%21")
ANTIPHON_WGMMA(40, "%20, %21, %22, %23", "%24", "%25")
ANTIPHON_WGMMA(48, "%24, %25, %26, %27", "%28", "%29")
ANTIPHON_WGMMA(56, "%28, %29, %30, %31", "%32", "%33")
ANTIPHON_WGMMA(64, "%32, %33, %34, %35", "%36", "%37")
ANTIPHON_WGMMA(80, "%40, %41, %42, %43", "%44", "%45")
ANTIPHON_WGMMA(96, "%48, %49, %50, %51", "%52", "%53")
ANTIPHON_WGMMA(112, "%56, %57, %58, %59", "%60", "%61")
ANTIPHON_WGMMA(128, "%64, %65, %66, %67", "%68", "%69")
ANTIPHON_WGMMA(136, "%68, %69, %70, %71", "%72", "%73")
ANTIPHON_WGMMA(144, "%72, %73, %74, %75", "%76", "%77")
ANTIPHON_WGMMA(160, "%80, %81, %82, %83", "%84", "%85")
ANTIPHON_WGMMA(192, "%96, %97, %98, %99", "%100", "%101")
ANTIPHON_WGMMA(256, "%128, %129, %130, %131", "%132", "%133")

#endif  // ANTIPHON_ON_HOST

}  // namespace antiphon
