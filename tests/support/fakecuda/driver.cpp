// libcuda.so.1, which torch opens by name, for machines without a driver. The rest of its functions abort by name.

#include <cstdio>
#include <cstdlib>

#define DRIVER_API extern "C" __attribute__((visibility("default")))

DRIVER_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

DRIVER_API int cuCtxGetCurrent(void** context) {
  static char the_context;
  *context = &the_context;
  return 0;
}
