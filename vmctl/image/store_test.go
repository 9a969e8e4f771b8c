package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func openStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(Config{Root: filepath.Join(t.TempDir(), "images")})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func put(t *testing.T, s *Store, name, kernel, initramfs string) Image {
	t.Helper()
	img, err := s.add(t.Context(), Reference(name), Meta{Version: metaVersion, Arch: "amd64", KernelFormat: FormatPVH}, []byte(kernel), []byte(initramfs))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func blobs(t *testing.T, s *Store) int {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(s.root, "blobs", "sha256", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(found)
}

func TestStoreKeepsImages(t *testing.T) {
	s := openStore(t)
	first := put(t, s, "tiny", "kernel", "one")
	again := put(t, s, "tiny", "kernel", "one")
	if first.Digest != again.Digest {
		t.Errorf("same content, digests %s and %s", first.Digest, again.Digest)
	}
	put(t, s, "other:2", "kernel", "two")
	second, err := Open(Config{Root: s.root})
	if err != nil {
		t.Fatal(err)
	}
	got, err := second.Get(t.Context(), "tiny")
	if err != nil || got.Name != "tiny:latest" || got.Digest != first.Digest || got.Size == 0 || got.Created.IsZero() {
		t.Errorf("got %+v, %v", got, err)
	}
	if body, err := os.ReadFile(got.Initramfs); err != nil || string(body) != "one" {
		t.Errorf("initramfs is %q, %v", body, err)
	}
	list, err := s.List(t.Context())
	if err != nil || len(list) != 2 || list[0].Name != "other:2" || list[1].Name != "tiny:latest" {
		t.Errorf("list is %+v, %v", list, err)
	}
	if n := blobs(t, s); n != 6 { // one kernel and one configuration are shared
		t.Errorf("%d blobs, want 6", n)
	}
	put(t, s, "tiny", "kernel", "three")
	if n := blobs(t, s); n != 6 {
		t.Errorf("%d blobs after a rebuild, want 6", n)
	}
}

func TestRemove(t *testing.T) {
	s := openStore(t)
	put(t, s, "tiny", "kernel", "one")
	var used *InUseError
	err := s.Remove(t.Context(), "tiny", func(name string) []string { return []string{name + " user"} })
	if !errors.As(err, &used) || used.Error() != "image tiny:latest is used by tiny:latest user" || !strings.Contains(used.Hint(), "remove") {
		t.Errorf("remove gave %v", err)
	}
	if err := s.Remove(t.Context(), "tiny", nil); err != nil {
		t.Error(err)
	}
	if n := blobs(t, s); n != 0 {
		t.Errorf("%d blobs are left", n)
	}
	var unknown *UnknownError
	if err := s.Remove(t.Context(), "tiny", nil); !errors.As(err, &unknown) {
		t.Errorf("second remove gave %v", err)
	}
}

func TestUnknownImageNamesTheNearest(t *testing.T) {
	s := openStore(t)
	put(t, s, "tiny", "k", "i")
	put(t, s, "debian:12", "k", "i")
	for name, want := range map[string]string{"tyny": "tiny", "tin": "tiny", "debian:11": "debian:12", "zzzzzzzz": "helix image build"} {
		_, err := s.Get(t.Context(), name)
		var unknown *UnknownError
		if !errors.As(err, &unknown) || !strings.Contains(unknown.Hint(), want) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want a hint with %q", name, err, want)
		}
	}
}

func TestDamageIsFound(t *testing.T) {
	for name, damage := range map[string]func(Image) string{
		"kernel":    func(i Image) string { return i.Kernel },
		"initramfs": func(i Image) string { return i.Initramfs },
		"manifest": func(i Image) string {
			return filepath.Join(filepath.Dir(i.Kernel), strings.TrimPrefix(i.Digest, "sha256:"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t)
			path := damage(put(t, s, "tiny", "kernel", "one"))
			body, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			body[0] ^= 1
			if err := errors.Join(os.Remove(path), os.WriteFile(path, body, 0o400)); err != nil {
				t.Fatal(err)
			}
			fresh, err := Open(Config{Root: s.root})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := fresh.Get(t.Context(), "tiny"); !errors.Is(err, ErrCorrupt) {
				t.Errorf("get gave %v", err)
			}
			if list, err := fresh.List(t.Context()); err != nil || len(list) != 1 {
				t.Errorf("list is %+v, %v", list, err)
			}
			put(t, fresh, "tiny", "kernel", "one") // a rebuild heals
			if _, err := fresh.Get(t.Context(), "tiny"); err != nil {
				t.Errorf("after the rebuild: %v", err)
			}
		})
	}
}

func TestMissingPartsAndFutureVersions(t *testing.T) {
	s := openStore(t)
	img := put(t, s, "tiny", "kernel", "one")
	if err := os.Remove(img.Kernel); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), "tiny"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("get without kernel gave %v", err)
	}
	if _, err := s.add(t.Context(), "new:latest", Meta{Version: 99}, []byte("k"), []byte("i")); err == nil || !strings.Contains(err.Error(), "newer") {
		t.Errorf("version 99 gave %v", err)
	}
	if err := os.WriteFile(s.path("index.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.List(t.Context()); err == nil || !strings.Contains(err.Error(), "index.json") {
		t.Errorf("list with a broken index gave %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Config{Root: filepath.Join(file, "images")}); err == nil {
		t.Error("a store below a file was opened")
	}
}

func TestOneChangeAtATime(t *testing.T) {
	s := openStore(t)
	unlock, err := s.lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Build(t.Context(), "tiny", BuildConfig{}); !errors.Is(err, ErrBusy) {
		t.Errorf("build gave %v", err)
	}
	if err := s.Remove(t.Context(), "tiny", nil); !errors.Is(err, ErrBusy) {
		t.Errorf("remove gave %v", err)
	}
	unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	put(t, s, "tiny", "k", "i")
	s.verified = map[string]fileStamp{}
	if _, err := s.Get(ctx, "tiny"); !errors.Is(err, context.Canceled) {
		t.Errorf("get with a dead context gave %v", err)
	}
}
