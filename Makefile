# `make` builds the CPU programs. `make help` lists the other targets, the libraries that were found, and what each missing
# one turns off.

MAKEFLAGS += --no-builtin-rules     # one of the built-in rules would apply to the .d files

CC      ?= gcc
ifeq ($(origin CXX)$(findstring clang,$(CC)),defaultclang)
  CXX   := $(shell echo '$(CC)' | sed 's/\(.*\)clang/\1clang++/')     # one OpenMP runtime for all objects
endif
MARCH   ?= native
WERROR  ?= 0
SAN     ?= 0
TSAN    ?= 0
ATTN    ?=
OPT     ?= $(if $(filter 1,$(SAN)),-O1,-O3)

# CPPFLAGS, CFLAGS, CXXFLAGS, NVCCFLAGS, LDFLAGS and LDLIBS are the user's, from the environment or the command line. They
# are added to ours, whose names have an underscore, and come last where they may replace what we chose.

# ---- libraries: 1 if found, 0 if not; each can be turned off (make ONEDNN=0)
hash   := \#
header  = $(shell echo '$(hash)include <$(1)>' | $(CC) $(CPPFLAGS) $(CFLAGS) -fsyntax-only -x c - 2>/dev/null && echo 1 || echo 0)
MPICC   ?= mpicc
ONEDNN  := $(or $(ONEDNN),$(call header,dnnl.h))
BLAS    := $(or $(BLAS),$(call header,cblas.h))
SODIUM  := $(or $(SODIUM),$(call header,sodium.h))
OPENMP  := $(call header,omp.h)
CJSON   := $(call header,cjson/cJSON.h)
XXHASH  := $(call header,xxhash.h)

# `mpicc -show` prints the compiler's command line, with Open MPI and MPICH alike. Of a compiler of its own and its flags,
# only the paths and libraries concern us.
MPI_SHOWN   := $(if $(filter 0,$(MPI)),,$(shell $(MPICC) -show 2>/dev/null))
MPI_COMPILE := $(filter -I%,$(MPI_SHOWN))
MPI_LINK    := $(filter -L% -l% -Wl% %.so %.a,$(MPI_SHOWN))
mpi_links    = $(shell echo '$(hash)include <mpi.h>\nint main(void) { return MPI_Finalize(); }' | \
  $(CC) $(CPPFLAGS) $(CFLAGS) $(MPI_COMPILE) -x c -o /dev/null - $(LDFLAGS) $(MPI_LINK) 2>/dev/null && echo 1 || echo 0)
ifeq ($(MPI),)
  MPI := $(if $(MPI_SHOWN),$(mpi_links),0)
  ifneq ($(if $(shell command -v $(MPICC)),1,0),$(MPI))
    $(shell echo 'make: expected flags that build an MPI program from `$(MPICC) -show`, found none; building without ranks (MPI=0)' >&2)
  endif
endif

# The CUDA Toolkit is that of nvcc, /usr/local/cuda, or what scripts/setup_cuda.sh installed. cuBLASLt and NCCL come from
# the Toolkit, from that script (in .cuda/12 for a Toolkit of CUDA 12), or from Python's wheels. CUDA=DIR selects another Toolkit; CUDA= and NCCL=0 turn them off.
whole = $(foreach d,$(1),$(if $(and $(wildcard $(d)/bin/nvcc),$(wildcard $(d)/include/cuda_runtime.h)),$(d)))
with  = $(firstword $(patsubst %/include/$(1),%,$(wildcard $(addsuffix /include/$(1),$(2)))))
ifeq ($(origin CUDA),undefined)
  CUDA   := $(firstword $(call whole,$(patsubst %/bin/nvcc,%,$(shell readlink -f "$$(command -v nvcc)")) /usr/local/cuda .cuda/nvidia/cu13))
endif
ifneq ($(CUDA),)
  twelve := $(shell grep -q 'define CUDART_VERSION *12' $(CUDA)/include/cuda_runtime_api.h 2>/dev/null && echo 12)
  pypi    = .cuda/$(twelve)$(if $(twelve),/)nvidia
  cublas  = $(if $(twelve),cublas,cu13)
  wheels  = $(shell for p in .venv/bin/python python3; do $$p -c 'import nvidia; print(*nvidia.__path__)'; done 2>/dev/null)
  CUBLAS := $(or $(call with,cublasLt.h,$(CUDA) $(pypi)/$(cublas)),$(call with,cublasLt.h,$(addsuffix /$(cublas),$(wheels))))
  NCCL   := $(or $(NCCL),$(call with,nccl.h,$(CUDA) /usr $(pypi)/nccl),$(call with,nccl.h,$(addsuffix /nccl,$(wheels))))
endif
USE_NCCL := $(if $(filter 1,$(MPI)),$(filter-out 0,$(NCCL)))

# gcc prefers vectors of 256 bits on processors that have 512, which made the first of them slower. On today's the wider
# ones are faster. On AMD's processors, gcc fuses the multiplications and additions of some sums and not of others,
# depending on the code around them; where it fuses all, a program for one normalizer gives the bits of one for all.
accepted = $(shell $(CC) -Werror $(1) -S -x c -o /dev/null /dev/null 2>/dev/null && echo $(1))
VECTORS := $(call accepted,-mprefer-vector-width=512) $(call accepted,--param=avoid-fma-max-bits=0)
# clang does not vectorize a maximum, because of NaN, and warns about each.
QUIET   := $(if $(call accepted,-Wpass-failed),-Wno-pass-failed)

# ---- flags. -g1 has what reports of defects name, function and line, and compiles faster; OPT="-O1 -g" adds variables.
COMMIT  := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
C_FLAGS  = -std=gnu11 -g1 $(OPT) -fopenmp -fno-math-errno -fno-trapping-math -Wall -Wextra $(QUIET) $(if $(filter 1,$(WERROR)),-Werror) -MMD -MP -I.
CC_FLAGS = $(C_FLAGS) -march=$(MARCH) $(VECTORS) $(CPPFLAGS) $(CFLAGS)
LD_FLAGS = -fopenmp $(LDFLAGS)
LD_LIBS  = -lcjson -lxxhash -lm $(LDLIBS)
ifeq ($(SAN),1)
  SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
  CC_FLAGS += $(SANITIZE) -DCHECK_RANGES
  LD_FLAGS += -fsanitize=address,undefined
endif
ifneq ($(ATTN),)
  bracket := (
  ifeq ($(shell grep -F ' X$(bracket)$(ATTN),' attention/normalizer.h),)
    $(error ATTN=$(ATTN): no such preset; `./train_gpt2 --attn help` lists them)
  endif
  ONLY    = '-DATTN_ONLY="$(ATTN)"'
  CC_FLAGS += $(ONLY)
endif
ifeq ($(ONEDNN),1)
  CC_FLAGS += -DUSE_ONEDNN
  LD_LIBS += -ldnnl
else ifeq ($(BLAS),1)
  CC_FLAGS += -DUSE_CBLAS
  LD_LIBS += $(or $(BLAS_LIBS),-lopenblas)
endif
ifeq ($(MPI),1)
  CC_FLAGS += -DUSE_MPI $(MPI_COMPILE)
  LD_LIBS += $(MPI_LINK)
  ifeq ($(SODIUM),1)
    HEARTBEAT = -DUSE_SODIUM
    LD_LIBS += -lsodium
  endif
endif

# The instruction sets of MARCH, as X("avx2") X("fma") ..., which the programs check at startup (runtime/cpu.c).
BUILT_FOR := $(shell $(CC) -march=$(MARCH) $(CFLAGS) -dM -E -x c /dev/null | sed -nE \
  's/^.define __(AVX|AVX2|FMA|BMI2|AVX512F|AVX512BW|AVX512DQ|AVX512VL|AVX512VNNI|AVX512BF16)__ 1/\1/p' | tr A-Z a-z | sed 's/.*/X("&")/' | sort)

# A checksum of what decides the code, with the processor that -march=native stands for.
codegen   = $(filter -O% -f% -m% --param=%,$(C_FLAGS) -march=$(MARCH) $(VECTORS) $(SANITIZE) $(CFLAGS))
flags_sum = $(firstword $(shell { echo '$(codegen)'; $(CC) $(codegen) -dM -E -x c /dev/null; } | cksum))

BUILD   ?= build$(if $(filter 1,$(SAN)),/san)$(if $(ATTN),/$(ATTN))
KERNELS  = $(BUILD)$(if $(filter 1,$(TSAN)),/tsan)
BIN     ?= $(if $(filter build,$(KERNELS)),.,$(KERNELS))
PROGRAMS = train_gpt2 sample_gpt2 eval_gpt2
LIBRARY  = $(patsubst %.c,$(BUILD)/%.o,$(wildcard $(addsuffix /*.c,eval run model attention data text math runtime)))
TESTS    = $(patsubst dev/tests/%.c,$(BUILD)/tests/%,$(wildcard dev/tests/test_*.c))

ifneq ($(OPENMP)$(CJSON)$(XXHASH),111)
ifeq ($(filter help clean lacking attn_c,$(MAKECMDGOALS)),)
  ifneq ($(shell $(CC) $(CPPFLAGS) $(CFLAGS) -fsyntax-only -x c /dev/null && echo 1),1)
    $(error expected a C compiler and its flags, found `$(strip $(CC) $(CPPFLAGS) $(CFLAGS))`, which fails as shown above)
  endif
  $(error cJSON, xxHash and, for clang, libomp are needed: \
    apt-get install libcjson-dev libxxhash-dev libomp-dev, or scripts/setup.sh --test)
endif
endif

all: $(addprefix $(BIN)/,$(PROGRAMS))

$(addprefix $(BIN)/,$(PROGRAMS) test_gpt2): $(BIN)/%: $(BUILD)/%.o $(LIBRARY)
	@echo '  LD  $@$(cannot_c)'
	@$(CC) $(CFLAGS) $(LD_FLAGS) -o $@ $^ $(LD_LIBS)

# What a program without these libraries cannot do.
cannot_c  = $(if $(filter 1,$(MPI)),,$(if $(filter %train_gpt2,$@), (a single rank: without MPI; see make help)))
cannot_cu = $(if $(USE_NCCL),,$(if $(findstring train_gpt2,$@), (a single GPU: without $(if $(filter 1,$(MPI)),NCCL,MPI); see make help)))

# With fault points (dev/faults), which these two files have. All other objects are those of train_gpt2.
FAULTY = runtime/file.o run/run.o
$(BUILD)/faults/train_gpt2: $(BUILD)/train_gpt2.o $(FAULTY:%=$(BUILD)/faults/%) $(filter-out $(FAULTY:%=$(BUILD)/%),$(LIBRARY))
	@echo '  LD  $@'
	@$(CC) $(CFLAGS) $(LD_FLAGS) -o $@ $^ $(LD_LIBS)

$(BUILD)/faults/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CC  $<, with fault points'
	@$(CC) $(CC_FLAGS) -DFAULTS -c -o $@ $<

# The library is an archive, so that a test that includes a .c file (with fault points, say) replaces the library's object.
# Nothing calls runtime/cpu.c, which runs before main(), so programs link its object explicitly.
$(BUILD)/library.a: $(LIBRARY)
	@rm -f $@
	@ar rcs $@ $^

$(BUILD)/tests/%: $(BUILD)/dev/tests/%.o $(BUILD)/runtime/cpu.o $(BUILD)/library.a
	@mkdir -p $(@D)
	@echo '  LD  $@'
	@$(CC) $(CFLAGS) $(LD_FLAGS) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(LD_LIBS)

# Built in double; they replace the library's objects in float32.
in_double = $(addprefix $(BUILD)/in_double/,attention/attention_cpu.o attention/rows.o math/tiles.o)
$(BUILD)/tests/test_gradients: $(BUILD)/dev/tests/float_path.o $(in_double)
$(BUILD)/in_double/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CC  $< in double'
	@$(CC) $(CC_FLAGS) -DREAL=double -c -o $@ $<

$(BUILD)/bench/%: $(BUILD)/dev/bench/%.o $(BUILD)/runtime/cpu.o $(BUILD)/library.a
	@mkdir -p $(@D)
	@echo '  LD  $@'
	@$(CC) $(CFLAGS) $(LD_FLAGS) -o $@ $^ $(LD_LIBS)

$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CC  $<'
	@$(CC) $(CC_FLAGS) -c -o $@ $<

# Objects depend on their flags: changing a flag rebuilds them.
quoted = '$(subst ','\'',$(1))'
record = @mkdir -p $(@D); echo $(quoted) | cmp -s - $@ || echo $(quoted) > $@
$(BUILD)/flags: FORCE
	$(call record,$(CC) $(CC_FLAGS))

# Every program contains runtime/cpu.o, so compiling it again links them all with the new flags.
$(BUILD)/runtime/cpu.o: $(BUILD)/link_flags
$(BUILD)/link_flags: FORCE
	$(call record,$(LD_FLAGS) $(LD_LIBS))

$(BUILD)/attention/modeling.o: attention/modeling_attn_gpt.py
$(BUILD)/eval/cities.o: data/cities.txt
$(BUILD)/runtime/cpu.o: private CC_FLAGS := $(filter-out -march=%,$(CC_FLAGS)) '-DBUILT_FOR=$(BUILT_FOR)'
$(BUILD)/runtime/version.o: private CC_FLAGS += '-DCOMMIT="$(COMMIT)"' '-DFLAGS_SUM="$(flags_sum)"'
$(BUILD)/runtime/version.o: $(BUILD)/commit

# So that a build without libsodium compiles only a few files.
$(BUILD)/runtime/heartbeat.o: private CC_FLAGS += $(HEARTBEAT)
$(BUILD)/runtime/heartbeat.o: $(BUILD)/heartbeat
$(BUILD)/heartbeat: FORCE
	$(call record,$(HEARTBEAT))

# ---- the PyTorch package (doc/pytorch.md) in $(PACKAGE): Python's files, and a library for each instruction set that
# attention/torch/library.py selects from. They depend on nothing but libc and libm: OpenMP's functions are those of the
# runtime that PyTorch has loaded.
PACKAGE    = $(BUILD)/python/attn_c
AVX512     = -march=x86-64-v4 $(VECTORS)
for_v3     = -march=x86-64-v3
for_v4     = $(AVX512)
for_bf16   = $(AVX512) -mavx512bf16 -mamx-tile -mamx-bf16
for_double = -march=x86-64-v3 -DREAL=double
torch_sources = attention/attention_cpu.c attention/normalizer.c attention/rows.c attention/torch/attn_c.c runtime/error.c runtime/number.c runtime/spelling.c \
  math/tiles.c runtime/utf8.c

# TORCH_CUDA=1 adds the library for GPUs, which takes 8 minutes on two cores.
TORCH_CUDA ?= 0
attn_c: $(patsubst %,$(PACKAGE)/attn_c_%.so,v3 v4 bf16 double $(if $(filter 1,$(TORCH_CUDA)),cuda)) $(patsubst attention/torch/%,$(PACKAGE)/%,$(wildcard attention/torch/*.py))

define torch_rules
$(PACKAGE)/attn_c_$(1).so: $(patsubst %.c,$(BUILD)/torch/$(1)/%.o,$(call torch_sources,$(1)))
	@mkdir -p $$(@D)
	@echo '  LD  $$@'
	@$(CC) $(CFLAGS) $(LDFLAGS) -shared -o $$@ $$^ -lm

$(BUILD)/torch/$(1)/%.o: %.c $(BUILD)/torch/flags
	@mkdir -p $$(@D)
	@echo '  CC  $$< $(1)'
	@$(CC) $$(C_FLAGS) $(CPPFLAGS) $(CFLAGS) -fPIC -fvisibility=hidden $$(for_$(1)) -c -o $$@ $$<
endef
$(foreach level,v3 v4 bf16 double,$(eval $(call torch_rules,$(level))))

$(PACKAGE)/attn_c_cuda.so: $(BUILD)/cuda/attn_c_cuda.so
	@cp $< $@

$(PACKAGE)/%.py: attention/torch/%.py
	@mkdir -p $(@D)
	@cp $< $@

$(BUILD)/torch/flags: FORCE
	$(call record,$(CC) $(C_FLAGS) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $(for_bf16))

# ---- the CUDA programs: nvcc builds them for GPUs in $(BUILD)/cuda, g++ for the CPU (dev/cuda_on_cpu) in $(ON_CPU)
GPUS       ?= 80 90
# The second flag joins a product and a sum in one rounding, as nvcc does.
CU_OPT     ?= $(if $(filter 1,$(SAN) $(TSAN)),-O0,-O1 -fexpensive-optimizations)
CU_PROGRAMS = train_gpt2 eval_gpt2 test_gpt2
ROWS       := $(shell sed -n 's/^FLASH_INSTANCE.\([a-z0-9_]*\),.*/\1/p' attention/flash_instances.h 2>/dev/null)
# INSTANCES="exp float" builds only these rows of attention's kernels, which is faster; $(KERNELS)/rows then has the table.
INSTANCES  ?= $(ROWS)
ifneq ($(strip $(INSTANCES)),$(ROWS))
  FEW      := -I$(KERNELS)/rows
  $(shell mkdir -p $(KERNELS)/rows/attention; sed -E '/^FLASH_INSTANCE/{/^.{15}($(subst $() ,|,$(strip $(INSTANCES)))),/!d}' \
    attention/flash_instances.h > $(KERNELS)/rows.new; cmp -s $(KERNELS)/rows.new $(KERNELS)/rows/attention/flash_instances.h || \
    mv $(KERNELS)/rows.new $(KERNELS)/rows/attention/flash_instances.h)
endif
# Rows in bf16 for one phi have kernels of their own for compute capability 9.0.
ROWS90     := $(shell sed -n 's/^FLASH_INSTANCE.\([a-z0-9_]*\), bf16, PHI_.*/\1/p' attention/flash_instances.h 2>/dev/null)
HOPPER      = $(filter 90,$(GPUS))
FLASH90     = $(if $(HOPPER),$(if $(ONLY),attention/flash90_instance.o,$(patsubst %,attention/flash90_instance_%.o,$(filter $(ROWS90),$(INSTANCES)))))
FLASH       = $(patsubst %.cu,%.o,$(filter-out %_instance.cu,$(wildcard attention/*.cu))) \
              $(if $(ONLY),attention/flash_instance.o,$(INSTANCES:%=attention/flash_instance_%.o)) $(FLASH90)
CUDA_SOURCES = $(wildcard cuda/*.cu)
ON_CPU      = $(KERNELS)/on_cpu
# The emulator is the same with and without sanitizers, and built once.
EMULATOR    = $(patsubst %/san,%,$(BUILD))/emulator
EMULATED    = $(patsubst %.cpp,$(EMULATOR)/%.o,$(filter-out $(if $(NCCL:0=),,%/nccl_on_cpu.cpp),$(wildcard dev/cuda_on_cpu/*.cpp)))

comma      := ,
architectures = $(foreach n,$(GPUS),-gencode arch=compute_$(call exact,$(n)),code=sm_$(call exact,$(n))) -gencode arch=compute_$(lastword $(GPUS)),code=compute_$(lastword $(GPUS))
library_in  = $(firstword $(wildcard $(addsuffix /$(1),$(2)/lib64 $(2)/lib $(2)/lib/x86_64-linux-gnu)))
# cuda/hopper.cuh needs sm_90a, which no other GPU can run; later ones use the PTX.
exact       = $(1)
$(BUILD)/cuda/dev/tests/test_kernels.o: private exact = $(patsubst 90,90a,$(1))
$(FLASH90:%=$(BUILD)/cuda/%): private architectures = -gencode arch=compute_90a,code=sm_90a
GPU_SHARED  = $(abspath $(call library_in,libcublasLt.so*,$(CUBLAS)) $(if $(USE_NCCL),$(call library_in,libnccl.so*,$(NCCL))))
CUDART      = $(call library_in,libcudart_static.a,$(CUDA))
GPU_LIBS    = $(GPU_SHARED) $(patsubst %/,-Wl$(comma)-rpath$(comma)%,$(dir $(GPU_SHARED))) $(CUDART) -ldl -lrt -lpthread
CU_FLAGS    = -std=c++17 $(FEW) -I. -MMD -MP $(ONLY) $(if $(HOPPER),-DUSE_HOPPER) $(if $(USE_NCCL),-DUSE_NCCL) $(patsubst %,-isystem %/include,$(filter-out 0 /usr,$(CUBLAS) $(NCCL)))
NVCC_FLAGS  = $(CU_FLAGS) -O3 -lineinfo $(architectures) -Xcompiler -Wall,-Wextra,-fPIC,-fopenmp $(if $(filter 1,$(WERROR)),-Werror all-warnings) $(PTXAS) $(NVCCFLAGS)
# The race check covers the kernels, not the emulator or the library, and does not support OpenMP's threads.
RACES       = $(filter 1,$(TSAN))
CXX_FLAGS   = $(CU_FLAGS) -Idev/cuda_on_cpu -isystem $(CUDA)/include -g1 $(CU_OPT) -march=$(MARCH) -fno-math-errno -Wall -Wextra \
              -Wno-unknown-pragmas -Wno-psabi $(if $(filter 1,$(WERROR)),-Werror) $(SANITIZE) $(if $(RACES),,-fopenmp) $(CPPFLAGS) $(CXXFLAGS) -fPIC
MPI_FLAGS   = $(if $(filter 1,$(MPI)),-DUSE_MPI -DOMPI_SKIP_MPICXX $(MPI_COMPILE))
compile_NVCC = $(CUDA)/bin/nvcc $(NVCC_FLAGS) -MF $(@:.o=.d) -c -o $@ $<
EMULATOR_FLAGS = -O2 -fopenmp $(filter-out -fopenmp $(CU_OPT) $(FEW) $(ONLY) $(SANITIZE),$(CXX_FLAGS))
compile_CXX = $(CXX) $(CXX_FLAGS) $(if $(RACES),-fsanitize=thread) -include $(ON_CPU)/gpu.h -x c++ -c -o $@ $<

# cu_rules(folder, suffix of the programs' names, compiler, prerequisites, libraries, those of attn_c_cuda.so,
# prerequisites of objects)
define cu_rules
$(CU_PROGRAMS:%=$(BIN)/%$(2)): $(BIN)/%$(2): $(1)/%.o $(BUILD)/runtime/cpu.o $(1)/flash.a $(1)/cuda.a $(BUILD)/library.a $(4)
	@echo '  LD  $$@$$(cannot_cu)'
	@$(CXX) $(CXXFLAGS) $(LD_FLAGS) -o $$@ $$(filter %.o,$$^) $$(filter %.a,$$^) $(5) $(LD_LIBS)

$(1)/tests/%: $(1)/dev/tests/%.o $(BUILD)/runtime/cpu.o $(1)/cuda.a $(BUILD)/library.a $(4)
	@mkdir -p $$(@D)
	@echo '  LD  $$@'
	@$(CXX) $(CXXFLAGS) $(LD_FLAGS) -o $$@ $$(filter %.o,$$^) $$(filter %.a,$$^) $(5) $(LD_LIBS)

$(1)/flash.so: $(1)/dev/tests/flash_so.o $(FLASH:%=$(1)/%) $(BUILD)/pic/library.a $(4)
	@echo '  LD  $$@'
	@$(CXX) $(CXXFLAGS) $(LD_FLAGS) -shared -o $$@ $$^ $(5) $(LD_LIBS)

$(1)/attn_c_cuda.so: $(1)/attention/torch/attn_c_cuda.o $(FLASH:%=$(1)/%) $(BUILD)/pic/library.a $(4)
	@echo '  LD  $$@'
	@$(CXX) $(CXXFLAGS) $(LDFLAGS) -shared -o $$@ $$^ $(6) -lm

$(1)/flash.a: $(FLASH:%=$(1)/%)
$(1)/cuda.a: $(CUDA_SOURCES:%.cu=$(1)/%.o)
$(1)/flash.a $(1)/cuda.a:
	@mkdir -p $$(@D)
	@rm -f $$@
	@ar rcs $$@ $$^

$(1)/%.o: %.cu $(1)/flags $(7)
	@mkdir -p $$(@D)
	@echo '  $(3) $$<'
	@$$(compile_$(3))

$(1)/attention/flash_instance_%.o: attention/flash_instance.cu $(1)/flags $(7)
	@mkdir -p $$(@D)
	@echo '  $(3) $$< $$*'
	@$$(compile_$(3)) -DINSTANCE=FLASH_$$*

$(1)/attention/flash90_instance_%.o: attention/flash90_instance.cu $(1)/flags $(7)
	@mkdir -p $$(@D)
	@echo '  $(3) $$< $$*'
	@$$(compile_$(3)) -DINSTANCE=FLASH_$$*
endef
$(eval $(call cu_rules,$(BUILD)/cuda,cu,NVCC,,$$(GPU_LIBS),$$(CUDART) -ldl -lrt -lpthread))
# -Bsymbolic: otherwise, if PyTorch has loaded the real CUDA runtime, its functions are called, not the emulator's.
ON_CPU_LIBS = -ldl -Wl$(comma)-Bsymbolic $(if $(RACES),-fsanitize=thread)
$(eval $(call cu_rules,$(ON_CPU),cu_on_cpu,CXX,$(EMULATOR)/emulator.a,-rdynamic $(ON_CPU_LIBS),-fopenmp $(ON_CPU_LIBS),$(ON_CPU)/gpu.h.gch))

# Headers that most of these files include, compiled once: the compiler finds the result next to gpu.h. A file that lacks
# the include fails under nvcc.
$(ON_CPU)/gpu.h.gch: cuda/gpu.cuh $(ON_CPU)/flags
	@echo '  CXX $<'
	@echo '#include "$<"' > $(@:.gch=)
	@$(CXX) $(CXX_FLAGS) $(if $(RACES),-fsanitize=thread) -x c++-header -o $@ $(@:.gch=)

# Never -O0, under which memset() is a call that the race check would see, although the emulator makes it.
$(EMULATOR)/%.o: %.cpp $(EMULATOR)/flags
	@mkdir -p $(@D)
	@echo '  CXX $<'
	@$(CXX) $(EMULATOR_FLAGS) $(MPI_FLAGS) -c -o $@ $<

$(EMULATOR)/emulator.a: $(EMULATED)
	@rm -f $@
	@ar rcs $@ $^

$(EMULATOR)/flags: FORCE
	@$(if $(and $(CUDA),$(CUBLAS)),,$(cuda_missing))
	$(call record,$(CXX) $(EMULATOR_FLAGS) $(MPI_FLAGS))

# The objects of the library that flash.so and attn_c_cuda.so contain, built for a shared library; without MPI, since there is
# one rank.
$(BUILD)/pic/library.a: $(addprefix $(BUILD)/pic/,attention/normalizer.o runtime/activity.o runtime/error.o runtime/number.o runtime/process.o runtime/spelling.o runtime/utf8.o)
	@ar rcs $@ $^

$(BUILD)/pic/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CC  $<'
	@$(CC) $(filter-out -DUSE_MPI,$(CC_FLAGS)) -fPIC -c -o $@ $<

$(BUILD)/cuda/flags: FORCE
	@$(if $(and $(CUDA),$(CUBLAS)),,$(cuda_missing))
	$(call record,$(CUDA)/bin/nvcc $(NVCC_FLAGS))

$(ON_CPU)/flags: FORCE
	@$(if $(and $(CUDA),$(CUBLAS)),,$(cuda_missing))
	$(call record,$(CXX) $(CXX_FLAGS) $(RACES))
cuda_missing = echo 'make: the CUDA Toolkit or cuBLASLt is missing (make help); scripts/setup_cuda.sh installs them' >&2; exit 1

# Runs a test program. `make -j2 -O -k` runs several at a time, and prints each one's output when it ends.
run/%: %
	@echo "== $<"
	@$(run_program) || { echo "to repeat: $(run_program)"; exit 1; }
run_program = $(if $(findstring /,$<),,./)$< $(WORD)

# Several programs share the cores, so waiting threads sleep instead of spinning.
check check_c test test_c test_on_cpu: export OMP_WAIT_POLICY ?= passive

SLOW  = $(BUILD)/tests/test_gradients $(BUILD)/tests/test_process
QUICK = test_training test_order test_errors test_sample
test_c: $(addprefix run/,$(SLOW) $(BIN)/test_gpt2 $(filter-out $(SLOW),$(TESTS)))
list_tests:
	@echo $(TESTS)

test_on_cpu: $(patsubst dev/tests/%.cu,run/$(ON_CPU)/tests/%,$(wildcard dev/tests/test_*.cu))

# test_process mostly waits, and most tests use one core, so the C tests run two at a time.
two = $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j2 -O)
check:
	@$(two) check_c
check_c: $(addprefix run/,$(filter-out $(SLOW),$(TESTS))) $(BIN)/test_gpt2
	@echo "== test_gpt2 v97"
	@$(BIN)/test_gpt2 v97 >$(BUILD)/v97.log; status=$$?; tail -n 1 $(BUILD)/v97.log; exit $$status

test: all
	@$(two) test_c
	@[ ! -x .venv/bin/pytest ] || .venv/bin/pytest -q -n 2 $(QUICK:%=dev/tests/%.py)

help:
	@echo 'make [all]      train_gpt2, sample_gpt2 and eval_gpt2'
	@echo 'make check      the quick C tests: 10 s after a build. CONTRIBUTING.md lists the other tiers'
	@echo 'make test       test_gpt2, $(words $(TESTS)) other C tests and, if .venv has pytest, the programs'\'' quick tests'
	@echo 'make SAN=1      with AddressSanitizer, UBSan, and range checks in math/vecmath.h, in build/san'
	@echo 'make ATTN=ssmax    programs for that attention normalizer alone, in build/ssmax'
	@echo 'make MARCH=x86-64-v3    for machines other than this one (now: $(MARCH))'
	@echo 'make ONEDNN=0 BLAS=0 MPI=0 SODIUM=0 NCCL=0    without these libraries'
	@echo 'make CC=clang      with clang 14 or newer (needs libomp-dev)'
	@echo 'CPPFLAGS, CFLAGS, CXXFLAGS, NVCCFLAGS, LDFLAGS and LDLIBS, of make or in the environment, are added to our flags'
	@echo
	@echo 'make train_gpt2cu test_gpt2cu    the CUDA programs, for GPUS="$(GPUS)" (compute capabilities) and later ones'
	@echo 'make train_gpt2cu_on_cpu test_gpt2cu_on_cpu    the same source built to run on a CPU (dev/cuda_on_cpu): slow, for tests'
	@echo 'make test_on_cpu    the tests of the CUDA kernels, on the CPU; TSAN=1: with the race check, in build/tsan'
	@echo
	@echo 'found on this machine'
	@$(call found,$(ONEDNN),oneDNN (libdnnl-dev),matmuls by oneDNN in float32 and bfloat16,$(if $(filter 1,$(BLAS)),matmuls by a CBLAS; bfloat16 widened to float32,matmuls by our own loops; slower))
	@$(call found,$(BLAS),CBLAS (libopenblas-dev),used if oneDNN is missing,our own loops if oneDNN is missing)
	@$(call found,$(MPI),MPI (libopenmpi-dev openmpi-bin),several ranks by scripts/launch.sh,one rank)
	@$(call found,$(SODIUM),libsodium (libsodium-dev),heartbeats between machines (--rank-timeout),none between machines)
	@$(call found,$(CJSON),cJSON (libcjson-dev),required,the build needs it)
	@$(call found,$(XXHASH),xxHash (libxxhash-dev),required,the build needs it)
	@$(call found,$(if $(CUDA),1),CUDA Toolkit,$(CUDA),no CUDA programs on GPU or CPU; scripts/setup_cuda.sh installs one)
	@$(call found,$(if $(CUBLAS),1),cuBLASLt,$(CUBLAS),no CUDA programs on GPU or CPU; scripts/setup_cuda.sh installs it)
	@$(call found,$(if $(USE_NCCL),1),NCCL$(if $(filter 1,$(MPI)),, (needs MPI)),$(NCCL),one GPU; scripts/setup_cuda.sh installs it)
found = printf '  %-3s %-32s %s\n' '$(if $(filter 1,$(1)),yes,no)' '$(2)' '$(if $(filter 1,$(1)),$(3),$(4))'

$(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMIT)' | cmp -s - $@ || echo '$(COMMIT)' > $@

# Prints what scripts/setup_cuda.sh has to install.
lacking:
	@echo $(if $(CUDA),,toolkit) $(if $(CUBLAS),,cublas$(twelve)) $(if $(NCCL),,nccl$(twelve))

clean:
	rm -rf build train_gpt2 sample_gpt2 eval_gpt2 test_gpt2 $(CU_PROGRAMS:%=%cu) $(CU_PROGRAMS:%=%cu_on_cpu)

.PHONY: all attn_c clean help lacking check check_c list_tests test test_c test_on_cpu FORCE
.SECONDARY:
-include $(wildcard $(foreach d,$(BUILD)/cuda $(ON_CPU),$(addprefix $(d)/,*.d attention/*.d attention/torch/*.d cuda/*.d dev/tests/*.d)) $(EMULATOR)/*/*/*.d $(BUILD)/pic/*/*.d $(BUILD)/torch/*/*/*.d $(BUILD)/torch/*/*/*/*.d)
-include $(LIBRARY:.o=.d) $(in_double:.o=.d) $(FAULTY:%.o=$(BUILD)/faults/%.d) $(patsubst %,$(BUILD)/%.d,$(PROGRAMS) test_gpt2) $(patsubst dev/tests/%.c,$(BUILD)/dev/tests/%.d,$(wildcard dev/tests/*.c))
