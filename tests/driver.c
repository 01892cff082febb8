// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1, for tests on machines without a GPU: every question is answered with "no device".
#define CUDA_ERROR_NO_DEVICE 100
#define NO_DEVICE(name) \
    int name(void) { return CUDA_ERROR_NO_DEVICE; }

NO_DEVICE(cuInit)
NO_DEVICE(cuDriverGetVersion)
NO_DEVICE(cuDeviceGetCount)
NO_DEVICE(cuCtxSetCurrent)
NO_DEVICE(cuDeviceGetPCIBusId)
NO_DEVICE(cuPointerGetAttributes)
NO_DEVICE(cuGetErrorString)

// What UCX's plugin of NIXL before 0.10 asks for besides.
NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxPopCurrent_v2)
NO_DEVICE(cuCtxPushCurrent_v2)
NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDevicePrimaryCtxRelease_v2)
NO_DEVICE(cuDevicePrimaryCtxRetain)
