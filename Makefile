# `make` builds the CPU programs; `make help` says what else there is, what was found, and what each absence turns off.

CC      ?= gcc
MARCH   ?= native
OPT     ?= -O3
WERROR  ?= 0
SAN     ?= 0
FAULTS  ?= 0
ATTN    ?=

# ---- what is there: 1 or 0, and each can be turned off by hand (make ONEDNN=0)
hash   := \#
header  = $(shell echo '$(hash)include <$(1)>' | $(CC) -fsyntax-only -x c - 2>/dev/null && echo 1 || echo 0)
MPICC   ?= mpicc
ONEDNN  := $(or $(ONEDNN),$(call header,dnnl.h))
BLAS    := $(or $(BLAS),$(call header,cblas.h))
MPI     := $(or $(MPI),$(if $(shell command -v $(MPICC)),1,0))
CJSON   := $(call header,cjson/cJSON.h)
XXHASH  := $(call header,xxhash.h)

# ---- flags
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
CFLAGS   = -std=gnu11 $(OPT) -g -march=$(MARCH) -fopenmp -fno-math-errno -fno-trapping-math -Wall -Wextra -MMD -MP -I.
LDFLAGS  = -fopenmp
LDLIBS   = -lcjson -lxxhash -lm
ifeq ($(WERROR),1)
  CFLAGS += -Werror
endif
ifeq ($(SAN),1)
  CFLAGS  += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
  LDFLAGS += -fsanitize=address,undefined
endif
ifeq ($(FAULTS),1)
  CFLAGS += -DFAULTS
endif
ifneq ($(ATTN),)
  bracket := (
  ifeq ($(shell grep -F ' X$(bracket)$(ATTN),' attention/normalizer.h),)
    $(error ATTN=$(ATTN): no such preset; `./train_gpt2 --attn help` lists them)
  endif
  CFLAGS += '-DATTN_ONLY="$(ATTN)"'
endif
ifeq ($(ONEDNN),1)
  CFLAGS += -DUSE_ONEDNN
  LDLIBS += -ldnnl
else ifeq ($(BLAS),1)
  CFLAGS += -DUSE_CBLAS
  LDLIBS += $(or $(BLAS_LIBS),-lopenblas)
endif
ifeq ($(MPI),1)
  CFLAGS += -DUSE_MPI $(shell $(MPICC) --showme:compile)
  LDLIBS += $(shell $(MPICC) --showme:link)
endif

# What MARCH stands for, as X("avx2") X("fma") ..., for the check at the start (runtime/cpu.c).
BUILT_FOR := $(shell $(CC) -march=$(MARCH) -dM -E -x c /dev/null | sed -nE \
  's/^.define __(AVX|AVX2|FMA|BMI2|AVX512F|AVX512BW|AVX512DQ|AVX512VL|AVX512VNNI|AVX512BF16)__ 1/\1/p' | tr A-Z a-z | sed 's/.*/X("&")/' | sort)

BUILD   ?= build$(if $(filter 1,$(SAN)),/san)$(if $(filter 1,$(FAULTS)),/faults)$(if $(ATTN),/$(ATTN))
BIN     ?= $(if $(filter build,$(BUILD)),.,$(BUILD))
PROGRAMS = train_gpt2 sample_gpt2 eval_gpt2
LIBRARY  = $(patsubst %.c,$(BUILD)/%.o,$(wildcard model.c runtime/*.c attention/*.c))
TESTS    = $(patsubst dev/tests/%.c,$(BUILD)/tests/%,$(wildcard dev/tests/test_*.c))

ifneq ($(CJSON)$(XXHASH),11)
$(if $(filter help clean,$(MAKECMDGOALS)),,$(error cJSON and xxHash are needed: apt-get install libcjson-dev libxxhash-dev, or scripts/setup.sh))
endif

all: $(addprefix $(BIN)/,$(PROGRAMS))

$(addprefix $(BIN)/,$(PROGRAMS) test_gpt2): $(BIN)/%: $(BUILD)/%.o $(LIBRARY)
	@echo '  LD  $@'
	@$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# From an archive, so that a test that includes a .c file (with fault points, say) has that in place of the library's object.
$(BUILD)/library.a: $(LIBRARY)
	@rm -f $@
	@ar rcs $@ $^

$(BUILD)/tests/%: $(BUILD)/dev/tests/%.o $(BUILD)/library.a
	@mkdir -p $(@D)
	@echo '  LD  $@'
	@$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/bench/%: $(BUILD)/dev/bench/%.o $(BUILD)/library.a
	@mkdir -p $(@D)
	@echo '  LD  $@'
	@$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CC  $<'
	@$(CC) $(CFLAGS) -c -o $@ $<

# Objects depend on the flags that they were built with: a changed flag rebuilds, an unchanged one does not.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CFLAGS)' | cmp -s - $@ || echo '$(CC) $(CFLAGS)' > $@

$(BUILD)/attention/modeling.o: attention/modeling_attn_gpt.py
$(BUILD)/runtime/cpu.o: private CFLAGS := $(filter-out -march=%,$(CFLAGS)) '-DBUILT_FOR=$(BUILT_FOR)'
$(BUILD)/runtime/run.o: private CFLAGS += '-DVERSION="$(VERSION)"'
$(BUILD)/runtime/run.o: $(BUILD)/version

test: $(TESTS) $(BIN)/test_gpt2
	@status=0; for t in $^; do echo "== $$t"; case $$t in */*) $$t ;; *) ./$$t ;; esac || status=1; done; exit $$status

help:
	@echo 'make [all]      train_gpt2, sample_gpt2 and eval_gpt2'
	@echo 'make test       the C tests: test_gpt2 and $(words $(TESTS)) of runtime/; no Python'
	@echo 'make SAN=1      with AddressSanitizer and UBSan, in build/san'
	@echo 'make ATTN=ssmax    programs that know only that attention normaliser, in build/ssmax'
	@echo 'make MARCH=x86-64-v3    for other machines than this one (now: $(MARCH))'
	@echo 'make ONEDNN=0 BLAS=0 MPI=0    without what was found'
	@echo
	@echo 'found on this machine'
	@$(call found,$(ONEDNN),oneDNN (libdnnl-dev),products by oneDNN in float32 and bfloat16,$(if $(filter 1,$(BLAS)),products by a CBLAS; bfloat16 widened to float32,products by own loops; slower))
	@$(call found,$(BLAS),CBLAS (libopenblas-dev),used where oneDNN is not there,products by own loops where oneDNN is not there)
	@$(call found,$(MPI),MPI (libopenmpi-dev openmpi-bin),several processes by scripts/launch.sh,one process)
	@$(call found,$(CJSON),cJSON (libcjson-dev),required,the build needs it)
	@$(call found,$(XXHASH),xxHash (libxxhash-dev),required,the build needs it)
found = printf '  %-3s %-32s %s\n' '$(if $(filter 1,$(1)),yes,no)' '$(2)' '$(if $(filter 1,$(1)),$(3),$(4))'

$(BUILD)/version: FORCE
	@mkdir -p $(@D)
	@echo '$(VERSION)' | cmp -s - $@ || echo '$(VERSION)' > $@

clean:
	rm -rf build train_gpt2 sample_gpt2 eval_gpt2 test_gpt2

.PHONY: all clean help test FORCE
.SECONDARY:
-include $(LIBRARY:.o=.d) $(patsubst %,$(BUILD)/%.d,$(PROGRAMS) test_gpt2) $(patsubst dev/tests/%.c,$(BUILD)/dev/tests/%.d,$(wildcard dev/tests/*.c))
