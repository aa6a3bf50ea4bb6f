// What the parts of the fake CUDA runtime share.
#pragma once

// The headers of the half types need parts of CUDA that wheels do not carry; only pointers to them are in signatures.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half;
struct __half2;
struct __nv_bfloat16;
struct __nv_bfloat162;

#define FAKECUDA_VISIBLE __attribute__((visibility("default")))
#define FAKECUDA_API extern "C" FAKECUDA_VISIBLE

int fakecuda_device();                                        // the calling thread's
void fakecuda_count_launch();                                 // one more kernel, on the stream that is recorded if any
void fakecuda_count_launch(void* stream);                     // one more kernel on this stream
FAKECUDA_API long fakecuda_launches();                        // kernels so far
bool fakecuda_is_silent(const char* name);                    // silent.txt names it
extern "C" [[noreturn]] void fakecuda_refuse(const char* name);  // a function that is not there was called
