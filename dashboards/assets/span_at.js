// Index of the span (left, right, top, bottom) at a point, or -1: the nearest within some pixels. Of several under the
// pointer it is the shortest, so that an instant within a long span can be reached.
window.overlapscope.spanAt = ({left, right, top, bottom}, {x, y}, nsPerPx) => {
  const NEAR_PX = 4
  let best = -1
  let nearest = NEAR_PX * nsPerPx
  for (let i = 0; i < left.length; i++) {
    if (y < top[i] || y > bottom[i]) continue
    const away = Math.max(left[i] - x, x - right[i], 0)
    const isShorter = best >= 0 && right[i] - left[i] < right[best] - left[best]
    if (away < nearest || (away === 0 && isShorter)) [best, nearest] = [i, away]
  }
  return best
}
