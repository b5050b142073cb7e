// Draws the parts of a page in view, plots with the markup around them, as PNG or SVG. Bokeh's layers take
// the same calls for both.
window.overlapscope.drawing = (() => {
  const LEFT_OUT = "button:not(.number, .host), input, select, kbd, svg, .help, .tools, .slider, .foot, .unseen, .save-menu"
  const MARGIN_PX = 12
  const NOTHING = "rgba(0, 0, 0, 0)"
  const SIDES = ["Top", "Right", "Bottom", "Left"]

  function common(one, other) {
    const [left, top] = [Math.max(one.left, other.left), Math.max(one.top, other.top)]
    const [right, bottom] = [Math.min(one.right, other.right), Math.min(one.bottom, other.bottom)]
    return new DOMRect(left, top, Math.max(0, right - left), Math.max(0, bottom - top))
  }

  function clip(ctx, {left, top, width, height}) {
    ctx.beginPath()
    ctx.rect(left, top, width, height)
    ctx.clip()
  }

  // For colors that CSS has mixed; SVG and its editors know only rgba.
  function plain(color) {
    const [red, green, blue, alpha = 1] = color.match(/[\d.e-]+/g).map(Number)
    return color.startsWith("color(srgb") ? `rgba(${[red, green, blue].map((each) => Math.round(each * 255))}, ${alpha})` : color
  }

  // --- boxes ----------------------------------------------------------------------------------------------------
  function outline(ctx, style, {left, top, width, height}, inset) {
    ctx.beginPath()
    if (style.borderTopLeftRadius !== "50%") return ctx.rect(left, top, width, height)
    ctx.ellipse(left + width / 2, top + height / 2, width / 2 - inset, height / 2 - inset, 0, 0, 2 * Math.PI)
  }

  function fill(ctx, style, box) {
    const image = style.backgroundImage
    const colors = (image.match(/(?:rgba?|color)\([^)]*\)/g) ?? []).map(plain)
    ctx.fillStyle = plain(style.backgroundColor)
    if (image.startsWith("linear-gradient(to right")) {
      ctx.fillStyle = ctx.createLinearGradient(box.left, 0, box.right, 0)
      colors.forEach((color, index) => ctx.fillStyle.addColorStop(index / (colors.length - 1), color))
    }
    if (ctx.fillStyle !== NOTHING) {
      outline(ctx, style, box, 0)
      ctx.fill()
    }
    for (const [, angle] of image.matchAll(/repeating-linear-gradient\((\d+)deg/g)) hatch(ctx, angle, colors[0], box)
    if (image.includes("radial-gradient")) dot(ctx, colors[0], box)
  }

  function dot(ctx, color, {left, top, width, height}) {
    const [apart, radius] = [3.3, 1]
    ctx.fillStyle = color
    for (let x = left + apart / 2; x < left + width; x += apart) {
      for (let y = top + apart / 2; y < top + height; y += apart) {
        ctx.beginPath()
        ctx.ellipse(x, y, radius, radius, 0, 0, 2 * Math.PI)
        ctx.fill()
      }
    }
  }

  function hatch(ctx, angle, color, box) {
    const [begin, end] = angle === "135" ? [box.bottom, box.top] : [box.top, box.bottom]
    ctx.save()
    clip(ctx, box)
    ctx.strokeStyle = color
    ctx.lineWidth = 1.5
    ctx.beginPath()
    for (let x = box.left - box.height; x < box.right; x += 4 * Math.SQRT2) {
      ctx.moveTo(x, begin)
      ctx.lineTo(x + box.height, end)
    }
    ctx.stroke()
    ctx.restore()
  }

  function frame(ctx, style, box) {
    const ends = [[box.left, box.top], [box.right, box.top], [box.right, box.bottom], [box.left, box.bottom]]
    const inwards = [[0, 1], [-1, 0], [0, -1], [1, 0]]
    const isRound = style.borderTopLeftRadius === "50%"
    SIDES.forEach((side, at) => {
      const [width, color] = [parseFloat(style[`border${side}Width`]), plain(style[`border${side}Color`])]
      if (!width || color === NOTHING) return
      ctx.strokeStyle = color
      ctx.lineWidth = width
      ctx.setLineDash(style[`border${side}Style`] === "dashed" ? [3, 2] : [])
      if (isRound) outline(ctx, style, box, width / 2)
      else {
        const [across, down] = inwards[at].map((way) => (way * width) / 2)
        ctx.beginPath()
        ctx.moveTo(ends[at][0] + across, ends[at][1] + down)
        ctx.lineTo(ends[(at + 1) % 4][0] + across, ends[(at + 1) % 4][1] + down)
      }
      ctx.stroke()
    })
    ctx.setLineDash([])
  }

  function drawBox(ctx, style, element) {
    let box = element.getBoundingClientRect()
    ctx.save()
    if (style.transform !== "none") {
      const {a, b, c, d} = new DOMMatrix(style.transform)
      ctx.translate(box.left + box.width / 2, box.top + box.height / 2)
      ctx.transform(a, b, c, d, 0, 0)
      const [width, height] = [element.offsetWidth, element.offsetHeight]
      box = new DOMRect(-width / 2, -height / 2, width, height)
    }
    fill(ctx, style, box)
    frame(ctx, style, box)
    ctx.restore()
  }

  // --- text -----------------------------------------------------------------------------------------------------
  function drawText(ctx, style, node) {
    const range = document.createRange()
    range.selectNodeContents(node)
    const [first] = range.getClientRects()
    if (!first?.width) return
    const weight = 100 * Math.round(style.fontWeight / 100) // Bokeh parses no other weights
    ctx.font = `${style.fontStyle} ${weight} ${style.fontSize} ${style.fontFamily}`
    ctx.fillStyle = plain(style.color)
    ctx.textAlign = "left"
    ctx.textBaseline = "alphabetic"
    let line = {text: "", box: first}
    for (const word of node.data.matchAll(/\S+/g)) {
      range.setStart(node, word.index)
      range.setEnd(node, word.index + word[0].length)
      const box = range.getBoundingClientRect()
      if (Math.abs(box.top - line.box.top) > 2) {
        write(ctx, line)
        line = {text: "", box}
      }
      line.text += `${word[0]} `
    }
    write(ctx, line)
  }

  function write(ctx, {text, box}) {
    const line = text.trim()
    if (line) ctx.fillText(line, box.left, box.top + ctx.measureText(line).fontBoundingBoxAscent)
  }

  // --- all parts ------------------------------------------------------------------------------------------------
  function drawPlot(ctx, kind, view) {
    const {left, top, width, height} = view.el.getBoundingClientRect()
    ctx.drawImage(view.export(kind).canvas, left, top, ...(kind === "png" ? [width, height] : []))
  }

  function draw(ctx, kind, element, shown) {
    const style = getComputedStyle(element)
    if (element.matches(LEFT_OUT) || style.display === "none" || style.visibility === "hidden") return
    const root = window.Bokeh.index.roots.find((view) => view.model.id === element.dataset.rootId)
    let seen = shown
    ctx.save()
    ctx.globalAlpha *= Number(style.opacity)
    if (style.display !== "contents") drawBox(ctx, style, element)
    if (style.overflowX !== "visible") {
      seen = common(shown, element.getBoundingClientRect())
      clip(ctx, seen)
    }
    if (root) drawPlot(ctx, kind, root)
    else if (seen.width && seen.height) {
      for (const node of element.childNodes) {
        if (node.nodeType === Node.TEXT_NODE) drawText(ctx, style, node)
        else if (node.nodeType === Node.ELEMENT_NODE) draw(ctx, kind, node, seen)
      }
    }
    ctx.restore()
  }

  // Returns a blob; kind is "png" or "svg". The caption is above the parts.
  return (parts, kind, caption) => {
    const CAPTION_PX = 22
    const boxes = parts.map((part) => part.getBoundingClientRect())
    const left = Math.min(...boxes.map((box) => box.left)) - MARGIN_PX
    const top = Math.min(...boxes.map((box) => box.top)) - MARGIN_PX - CAPTION_PX
    const width = Math.ceil(Math.max(...boxes.map((box) => box.right)) + MARGIN_PX - left)
    const height = Math.ceil(Math.max(...boxes.map((box) => box.bottom)) + MARGIN_PX - top)
    const Layer = window.Bokeh.index.roots[0].export("png").constructor
    const layer = new Layer(kind === "svg" ? "svg" : "canvas", true)
    layer.resize(width, height)
    const {ctx} = layer
    ctx.scale(layer.pixel_ratio, layer.pixel_ratio)
    ctx.fillStyle = getComputedStyle(document.body).backgroundColor
    ctx.fillRect(0, 0, width, height)
    const {color, fontFamily} = getComputedStyle(document.body)
    ctx.fillStyle = plain(color)
    ctx.font = `normal 600 13px ${fontFamily}`
    ctx.textBaseline = "alphabetic"
    ctx.fillText(caption, MARGIN_PX, MARGIN_PX + 11)
    ctx.translate(-left, -top)
    for (const part of parts) draw(ctx, kind, part, new DOMRect(left, top, width, height))
    return layer.to_blob()
  }
})()
