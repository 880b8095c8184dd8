// The few calls by which torch looks at a GPU, answered as a host of eight H200 would: enough for tensors without
// storage (FakeTensorMode), for torch's choice of kernels and for autograd. Built and preloaded by launch/gpu_static.sh;
// its soname is libcuda.so.1, as which torch opens the driver. Nothing can be computed with it.
#include <driver_types.h>
#include <string.h>

int cudaGetDeviceCount(int *count) { *count = 8; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *to, int device) {
  memset(to, 0, sizeof *to);
  strcpy(to->name, "NVIDIA H200");
  to->major = 9;
  to->multiProcessorCount = 132;
  to->totalGlobalMem = 141ull << 30;
  to->warpSize = 32;
  to->maxThreadsPerBlock = 1024;
  to->maxThreadsPerMultiProcessor = 2048;
  to->regsPerMultiprocessor = 65536;
  to->sharedMemPerMultiprocessor = 233472;
  to->sharedMemPerBlockOptin = 232448;
  to->sharedMemPerBlock = 49152;
  to->l2CacheSize = 60 << 20;
  return 0;
}

int cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) { *lowest = 0; *highest = -5; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
