package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// UnknownError reports a name that no image has.
type UnknownError struct {
	Name string
	Near []string // names that look alike, best first, possibly none
}

func (e *UnknownError) Error() string { return fmt.Sprintf("image %q not found", e.Name) }

// Hint names the images that were perhaps meant.
func (e *UnknownError) Hint() string {
	if len(e.Near) > 0 {
		return "did you mean " + strings.Join(e.Near, ", ") + "?"
	}
	return "build one with: helix image build tiny"
}

// InUseError reports an image that may not be removed yet.
type InUseError struct {
	Name string
	By   []string // names of the workspaces
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("image %s is used by %s", e.Name, strings.Join(e.By, ", "))
}

// Hint says how to free the image.
func (e *InUseError) Hint() string {
	return "remove these workspaces first: " + strings.Join(e.By, ", ")
}

// Reference completes a name with the tag "latest".
func Reference(name string) string {
	if strings.Contains(name, ":") {
		return name
	}
	return name + ":latest"
}

// readIndex reads the index as it is on disk, since another process may have
// changed it. No index is an empty store.
func (s *Store) readIndex() (v1.Index, error) {
	index := v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{}}
	body, err := os.ReadFile(s.path(v1.ImageIndexFile))
	if errors.Is(err, fs.ErrNotExist) {
		return index, nil
	}
	if err != nil {
		return index, fmt.Errorf("read image index: %w", err)
	}
	if err := json.Unmarshal(body, &index); err != nil {
		return index, fmt.Errorf("decode %s: %w", s.path(v1.ImageIndexFile), err)
	}
	return index, nil
}

func (s *Store) writeIndex(index v1.Index) error {
	body, err := json.Marshal(index)
	if err != nil {
		return fmt.Errorf("encode image index: %w", err)
	}
	return writeFile(s.path(v1.ImageIndexFile), body)
}

// sweep removes the blobs that no manifest of index needs, and what a killed
// build has left.
func (s *Store) sweep(ctx context.Context, index v1.Index) error {
	needed := map[string]bool{}
	for _, d := range index.Manifests {
		needed[d.Digest.Encoded()] = true
		m, err := s.manifest(ctx, d)
		if err != nil {
			// What a damaged image needs is not known: keep everything.
			return nil //nolint:nilerr // the damage is reported where the image is opened
		}
		for _, part := range append(m.Layers, m.Config) {
			needed[part.Digest.Encoded()] = true
		}
	}
	blobs, err := filepath.Glob(filepath.Join(s.root, v1.ImageBlobsDir, "*", "*"))
	if err != nil {
		return fmt.Errorf("list blobs: %w", err)
	}
	var errs []error
	for _, path := range blobs {
		if !needed[filepath.Base(path)] {
			errs = append(errs, os.Remove(path))
		}
	}
	errs = append(errs, os.RemoveAll(s.path("ingest")))
	return errors.Join(errs...)
}

func find(index v1.Index, ref string) int {
	return slices.IndexFunc(index.Manifests, func(d v1.Descriptor) bool {
		return d.Annotations[v1.AnnotationRefName] == ref
	})
}

func names(index v1.Index) []string {
	list := make([]string, 0, len(index.Manifests))
	for _, d := range index.Manifests {
		list = append(list, d.Annotations[v1.AnnotationRefName])
	}
	return list
}

// nearest returns the names within a third of their length of want, best first.
func nearest(want string, names []string) []string {
	type near struct {
		name     string
		distance int
	}
	var list []near
	for _, n := range names {
		short, wanted := strings.TrimSuffix(n, ":latest"), strings.TrimSuffix(want, ":latest")
		if d := distance(wanted, short); d <= max(len(short)/3, 1) || strings.HasPrefix(short, wanted) {
			list = append(list, near{short, d})
		}
	}
	slices.SortStableFunc(list, func(a, b near) int { return a.distance - b.distance })
	out := make([]string, 0, len(list))
	for _, n := range list {
		out = append(out, n.name)
	}
	return out
}

// distance is the number of letters to insert, remove or replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost = 1 + min(diagonal, row[j], row[j-1])
			}
			diagonal, row[j] = row[j], cost
		}
	}
	return row[len(b)]
}

// writeFile replaces path in one step, surviving a crash at any point.
func writeFile(path string, body []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.Write(body)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(f.Name()))
	}
	return nil
}
