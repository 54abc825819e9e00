#include "zero/base/error.h"

int main() { return 0; }
