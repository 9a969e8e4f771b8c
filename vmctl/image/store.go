// Package image keeps the images that virtual machines start from.
//
// A Store is an OCI image layout (image-layout.md of the OCI image
// specification): blobs named by their SHA-256 digest, and an index that gives
// them names. An image is a kernel, an initramfs and a small configuration, each
// one blob with a media type of its own. What a Store hands out has been checked
// against its digest, and a blob that does not match is an error, never a
// warning.
//
// Several processes may read one store; changing it is serialised by a lock file
// and fails with ErrBusy when somebody else is at it.
package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/errdef"
)

// Media types of an image's parts.
const (
	ArtifactType  = "application/vnd.helix.image.v1"
	TypeConfig    = "application/vnd.helix.image.config.v1+json"
	TypeKernel    = "application/vnd.helix.image.kernel.v1"
	TypeInitramfs = "application/vnd.helix.image.initramfs.v1+cpio"
)

var (
	// ErrBusy reports that another process is changing the store.
	ErrBusy = errors.New("image store is being changed by another process")
	// ErrCorrupt reports a blob that does not match its digest.
	ErrCorrupt = errors.New("content does not match its digest")
)

// Kernel formats.
const (
	FormatPVH     = "vmlinux-pvh" // uncompressed ELF that QEMU enters by its PVH note
	FormatBzImage = "bzImage"     // needs firmware with linuxboot
	FormatImage   = "Image"       // arm64
)

// Meta is the configuration blob: what cannot be seen from the other blobs.
type Meta struct {
	Version      int    `json:"version"`
	Recipe       string `json:"recipe"`
	Arch         string `json:"arch"`          // GOARCH of the guest
	Kernel       string `json:"kernel"`        // release, as uname -r prints it
	KernelFormat string `json:"kernel_format"` // one of the Format constants
}

// Image is one image of a store. Its files are the blobs themselves: they must
// not be written, and they stay until the image is removed or rebuilt.
type Image struct {
	Name      string    `json:"name"`   // NAME:TAG
	Digest    string    `json:"digest"` // of the manifest
	Meta      Meta      `json:"meta"`
	Kernel    string    `json:"kernel"`    // path
	Initramfs string    `json:"initramfs"` // path
	Size      int64     `json:"size"`      // bytes of all blobs
	Created   time.Time `json:"created"`   // when it was stored here
}

// Config says where a store is.
type Config struct {
	Root string       // folder, made when missing
	Log  *slog.Logger // nil: discard
}

// Store is an image store. It may be used concurrently.
type Store struct {
	root  string
	log   *slog.Logger
	blobs *oci.Storage

	mu       sync.Mutex
	verified map[string]fileStamp // blob path -> state of the file when its digest was right
}

type fileStamp struct {
	size  int64
	mtime time.Time
}

// Open opens the store at cfg.Root and makes it when there is none.
func Open(cfg Config) (*Store, error) {
	root, err := filepath.Abs(cfg.Root)
	if err != nil {
		return nil, fmt.Errorf("open image store %s: %w", cfg.Root, err)
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	blobs, err := oci.NewStorage(root)
	if err != nil {
		return nil, fmt.Errorf("open image store %s: %w", root, err)
	}
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Store{root: root, log: log, blobs: blobs, verified: map[string]fileStamp{}}
	layout, err := json.Marshal(v1.ImageLayout{Version: v1.ImageLayoutVersion})
	if err != nil {
		return nil, fmt.Errorf("encode image layout: %w", err)
	}
	if _, err := os.Stat(s.path(v1.ImageLayoutFile)); errors.Is(err, fs.ErrNotExist) {
		if err := writeFile(s.path(v1.ImageLayoutFile), layout); err != nil {
			return nil, fmt.Errorf("open image store: %w", err)
		}
	}
	return s, nil
}

// Get returns the image called name after checking the digest of each blob.
func (s *Store) Get(ctx context.Context, name string) (Image, error) {
	index, err := s.readIndex()
	if err != nil {
		return Image{}, err
	}
	ref := Reference(name)
	i := find(index, ref)
	if i < 0 {
		return Image{}, &UnknownError{Name: name, Near: nearest(ref, names(index))}
	}
	img, err := s.load(ctx, index.Manifests[i])
	if err != nil {
		return Image{}, fmt.Errorf("open image %s: %w", ref, err)
	}
	return img, nil
}

// List returns every image, by name. A damaged one is listed without its parts.
func (s *Store) List(ctx context.Context) ([]Image, error) {
	index, err := s.readIndex()
	if err != nil {
		return nil, err
	}
	list := make([]Image, 0, len(index.Manifests))
	for _, d := range index.Manifests {
		img, err := s.describe(ctx, d)
		if err != nil {
			s.log.WarnContext(ctx, "image damaged", "image", d.Annotations[v1.AnnotationRefName], "err", err)
			img = Image{Name: d.Annotations[v1.AnnotationRefName], Digest: d.Digest.String()}
		}
		list = append(list, img)
	}
	slices.SortFunc(list, func(a, b Image) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// Remove removes the image called name and the blobs that no other image needs.
// It refuses with an InUseError when users, called with the full name, names
// somebody; nil means nobody uses anything.
func (s *Store) Remove(ctx context.Context, name string, users func(name string) []string) error {
	unlock, err := s.lock()
	if err != nil {
		return fmt.Errorf("remove image %s: %w", name, err)
	}
	defer unlock()
	index, err := s.readIndex()
	if err != nil {
		return err
	}
	ref := Reference(name)
	i := find(index, ref)
	if i < 0 {
		return &UnknownError{Name: name, Near: nearest(ref, names(index))}
	}
	if users != nil {
		if by := users(ref); len(by) > 0 {
			return &InUseError{Name: ref, By: by}
		}
	}
	index.Manifests = slices.Delete(index.Manifests, i, i+1)
	if err := s.writeIndex(index); err != nil {
		return fmt.Errorf("remove image %s: %w", ref, err)
	}
	return s.sweep(ctx, index)
}

// add stores the parts as the image ref, replacing an image of that name. The
// index is changed last, so an image is there whole or not at all.
func (s *Store) add(ctx context.Context, ref string, meta Meta, kernel, initramfs []byte) (Image, error) {
	config, err := json.Marshal(meta)
	if err != nil {
		return Image{}, fmt.Errorf("encode image configuration: %w", err)
	}
	m := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest, ArtifactType: ArtifactType}
	if m.Config, err = s.push(ctx, TypeConfig, config); err != nil {
		return Image{}, fmt.Errorf("store configuration: %w", err)
	}
	for _, part := range []struct {
		mediaType string
		body      []byte
	}{{TypeKernel, kernel}, {TypeInitramfs, initramfs}} {
		d, err := s.push(ctx, part.mediaType, part.body)
		if err != nil {
			return Image{}, fmt.Errorf("store %s: %w", part.mediaType, err)
		}
		m.Layers = append(m.Layers, d)
	}
	body, err := json.Marshal(m)
	if err != nil {
		return Image{}, fmt.Errorf("encode manifest: %w", err)
	}
	d, err := s.push(ctx, v1.MediaTypeImageManifest, body)
	if err != nil {
		return Image{}, fmt.Errorf("store manifest: %w", err)
	}
	d.Annotations = map[string]string{v1.AnnotationRefName: ref}
	index, err := s.readIndex()
	if err != nil {
		return Image{}, err
	}
	if i := find(index, ref); i >= 0 {
		index.Manifests[i] = d
	} else {
		index.Manifests = append(index.Manifests, d)
	}
	if err := s.writeIndex(index); err != nil {
		return Image{}, err
	}
	if err := s.sweep(ctx, index); err != nil {
		return Image{}, err
	}
	return s.load(ctx, d)
}

// push stores one blob. One that is there but damaged is replaced, or it would
// make every later build useless.
func (s *Store) push(ctx context.Context, mediaType string, body []byte) (v1.Descriptor, error) {
	d := content.NewDescriptorFromBytes(mediaType, body)
	err := s.blobs.Push(ctx, d, bytes.NewReader(body))
	if !errors.Is(err, errdef.ErrAlreadyExists) {
		return d, err
	}
	if s.verify(d) == nil {
		return d, nil
	}
	if err := s.blobs.Delete(ctx, d); err != nil {
		return d, fmt.Errorf("replace damaged blob: %w", err)
	}
	return d, s.blobs.Push(ctx, d, bytes.NewReader(body))
}

// load describes an image and checks every byte of it.
func (s *Store) load(ctx context.Context, d v1.Descriptor) (Image, error) {
	img, err := s.describe(ctx, d)
	if err != nil {
		return Image{}, err
	}
	m, err := s.manifest(ctx, d)
	if err != nil {
		return Image{}, err
	}
	for _, part := range m.Layers {
		if err := ctx.Err(); err != nil {
			return Image{}, err
		}
		if err := s.verify(part); err != nil {
			return Image{}, err
		}
	}
	if img.Kernel == "" || img.Initramfs == "" {
		return Image{}, errors.New("kernel or initramfs is missing")
	}
	return img, nil
}

func (s *Store) describe(ctx context.Context, d v1.Descriptor) (Image, error) {
	m, err := s.manifest(ctx, d)
	if err != nil {
		return Image{}, err
	}
	body, err := content.FetchAll(ctx, s.blobs, m.Config)
	if err != nil {
		return Image{}, fmt.Errorf("read configuration: %w", corrupt(err))
	}
	img := Image{Name: d.Annotations[v1.AnnotationRefName], Digest: d.Digest.String(), Size: d.Size + m.Config.Size}
	if err := json.Unmarshal(body, &img.Meta); err != nil {
		return Image{}, fmt.Errorf("decode configuration: %w", err)
	}
	if img.Meta.Version > metaVersion {
		return Image{}, fmt.Errorf("configuration version %d is newer than this program knows (%d)", img.Meta.Version, metaVersion)
	}
	for _, part := range m.Layers {
		img.Size += part.Size
		switch part.MediaType {
		case TypeKernel:
			img.Kernel = s.blobPath(part)
		case TypeInitramfs:
			img.Initramfs = s.blobPath(part)
		}
	}
	if info, err := os.Stat(s.blobPath(d)); err == nil {
		img.Created = info.ModTime().UTC()
	}
	return img, nil
}

const metaVersion = 1

func (s *Store) manifest(ctx context.Context, d v1.Descriptor) (v1.Manifest, error) {
	var m v1.Manifest
	body, err := content.FetchAll(ctx, s.blobs, d)
	if err != nil {
		return m, fmt.Errorf("read manifest: %w", corrupt(err))
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return m, fmt.Errorf("decode manifest: %w", err)
	}
	return m, nil
}

// verify checks the digest of a blob. It is remembered as long as the file keeps
// its size and time, because hashing a kernel at each start costs a tenth of a
// guest's boot.
func (s *Store) verify(d v1.Descriptor) error {
	path := s.blobPath(d)
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("read blob: %w", err)
	}
	stamp := fileStamp{info.Size(), info.ModTime()}
	s.mu.Lock()
	known, ok := s.verified[path]
	s.mu.Unlock()
	if ok && known == stamp && stamp.size == d.Size {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("read blob: %w", err)
	}
	defer f.Close()
	r := content.NewVerifyReader(f, d)
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("read blob %s: %w", d.Digest, corrupt(err))
	}
	if err := r.Verify(); err != nil {
		return fmt.Errorf("blob %s: %w", d.Digest, corrupt(err))
	}
	s.mu.Lock()
	s.verified[path] = stamp
	s.mu.Unlock()
	return nil
}

// corrupt marks the errors of a content check as ErrCorrupt.
func corrupt(err error) error {
	if errors.Is(err, content.ErrMismatchedDigest) || errors.Is(err, content.ErrTrailingData) ||
		errors.Is(err, content.ErrInvalidDescriptorSize) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.Join(ErrCorrupt, err)
	}
	return err
}

func (s *Store) path(name string) string { return filepath.Join(s.root, name) }

func (s *Store) blobPath(d v1.Descriptor) string {
	return filepath.Join(s.root, v1.ImageBlobsDir, d.Digest.Algorithm().String(), d.Digest.Encoded())
}
