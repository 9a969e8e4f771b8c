# What a person types. The work is in .ci/ and deploy/demo/.

GO      ?= go
# The agent must be static to run in a guest, so nothing uses cgo.
BUILD   := CGO_ENABLED=0 $(GO) build

.PHONY: all build demo demo-stop test bench lint fmt clean

all: build

build: ## the two programs, in bin/
	@mkdir -p bin
	$(BUILD) -o bin/helix ./cmd/helix
	$(BUILD) -ldflags '-s -w' -o bin/helix-agent ./cmd/helix-agent

demo: ## a running virtual machine with a name, and what to do with it
	@deploy/demo/run

demo-stop: ## take the demo down, with its state folder
	@deploy/demo/stop

test: ## everything that checks the product; the last line is the count
	@.ci/test

bench: ## the speed of this machine, as ratios
	@.ci/bench

lint: ## the static checks of "make test" alone
	@.ci/lint

fmt: ## write the code the way "make test" wants it
	$(GO) tool -modfile=.ci/tools/go.mod gofumpt -w $$(find . -name '.[!.]?*' ! -name .ci -prune -o -name '*.go' -print)

clean: ## remove what was built
	rm -rf bin
